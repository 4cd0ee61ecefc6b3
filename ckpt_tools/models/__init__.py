"""What a model is, from its config.json."""
