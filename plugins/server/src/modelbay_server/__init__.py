"""Models over HTTP, as OpenAI's clients expect them."""
