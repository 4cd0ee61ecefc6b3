"""The ecosystems: what they call modules and factors, what is written for them, and what their loaders do."""
