"""TinyLM for Modelbay."""
