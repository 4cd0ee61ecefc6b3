"""The base model that an adapter is for: its names, its shapes, and the rows of its tensors that a merge changes."""
