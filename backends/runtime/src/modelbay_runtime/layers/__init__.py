"""The blocks that families are made of."""
