"""Look after the folder that a run saves its checkpoints to: find them, verify them, remove what is superseded."""
