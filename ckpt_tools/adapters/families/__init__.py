"""Families of adapters: one file for each, with all that this one knows."""
