"""Configs of strangers: what they try, and a process in which many are built, each in a walled copy."""
