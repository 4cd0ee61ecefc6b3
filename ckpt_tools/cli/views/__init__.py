"""Results as pages for browsers: one self-contained HTML file each. Draws results, and runs nothing."""
