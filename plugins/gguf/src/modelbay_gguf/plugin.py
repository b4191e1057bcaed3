"""What modelbay-gguf adds to Modelbay. Imports nothing heavy."""
