"""`shard`, `gather`, `reshard`: what a destination should hold, checked, written and published."""
