"""Reading an adapter out of whatever holds one, from headers alone."""
