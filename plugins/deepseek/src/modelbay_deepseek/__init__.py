"""The DeepSeek family for Modelbay."""
