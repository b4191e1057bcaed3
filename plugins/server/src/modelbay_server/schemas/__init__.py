"""What clients may send: pydantic models that refuse what they do not know."""
