"""Processes of our own: a function in a child, its answer, and its end."""
