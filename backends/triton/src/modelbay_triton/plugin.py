"""What modelbay-triton adds to Modelbay. Imports nothing heavy."""
