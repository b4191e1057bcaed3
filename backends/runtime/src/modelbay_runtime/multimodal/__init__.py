"""Images and audio in prompts: what a request carries, and what a model that takes them must offer."""
