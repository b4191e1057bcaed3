"""What clients get: outputs of the engine in the shapes of the API."""
