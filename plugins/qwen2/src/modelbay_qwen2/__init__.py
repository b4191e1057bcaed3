"""Qwen2 and Qwen2.5 for Modelbay."""
