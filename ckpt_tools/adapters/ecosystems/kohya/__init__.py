"""kohya's sd-scripts, and LyCORIS beside them."""
