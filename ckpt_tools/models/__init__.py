"""What a model is, from its config.json, and how it is built. Importing this package imports no torch."""
