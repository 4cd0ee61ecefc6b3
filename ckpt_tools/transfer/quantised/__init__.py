"""Quantised weights as what they stand for: a checkpoint whose tensors are decoded while their bytes are read."""
