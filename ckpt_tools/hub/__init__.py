"""Onto the hub and proven there: what to send, one guarded commit, and what arrived.

The client library is imported only to send something: it takes longer to load than all of ckpt.
"""
