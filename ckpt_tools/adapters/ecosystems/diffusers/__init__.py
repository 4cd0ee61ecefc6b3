"""diffusers: what is written for it, and what `load_lora_weights` does."""
