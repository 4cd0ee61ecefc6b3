"""What is wrong with an adapter: by its headers, by its values, and held against its base model."""
