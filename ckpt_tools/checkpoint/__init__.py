"""What a checkpoint is: tensors, boxes, meshes, names; the standard library alone, and no byte is read."""
