"""From two descriptions to bytes: the plan, the only reader of boxes, and the only writer."""
