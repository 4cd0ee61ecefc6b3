"""Formats: bytes to description and back. Modules here parse and build buffers and open nothing."""
