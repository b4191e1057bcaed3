"""What modelbay-llama adds to Modelbay. Imports nothing heavy."""
