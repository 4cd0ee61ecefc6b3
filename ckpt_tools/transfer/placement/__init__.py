"""Rules: which mesh axis cuts which tensor along which dim, by patterns on FQNs."""
