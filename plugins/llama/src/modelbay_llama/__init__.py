"""Llama and Mistral for Modelbay."""
