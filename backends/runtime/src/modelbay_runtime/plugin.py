"""What modelbay-runtime adds to Modelbay. Imports nothing heavy."""
