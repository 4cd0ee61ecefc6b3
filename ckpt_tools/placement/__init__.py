"""Rules: which mesh axis cuts which tensor along which dim, by patterns on FQNs.

A pattern (`description.globs`) and what it means (`rule`) come from a YAML file or from `--set` (`parse`), or from the
model's own tensor-parallel plan (`tp_plan`); `place` applies them to the tensors of a checkpoint.
"""
