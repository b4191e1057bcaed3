"""From hidden states to embeddings, classes and scores."""
