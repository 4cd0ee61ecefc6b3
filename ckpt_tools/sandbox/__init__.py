"""The sandbox around the building of models whose config.json comes from a stranger (see docs/dev/decisions/0009)."""
