"""What modelbay-qwen2 adds to Modelbay. Imports nothing heavy."""
