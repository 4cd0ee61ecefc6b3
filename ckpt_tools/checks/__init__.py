"""Hold a checkpoint against its manifest, its headers, its own bytes, or another checkpoint: findings."""
