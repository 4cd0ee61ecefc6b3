"""PEFT: its configuration, its files, and what `PeftModel.from_pretrained` does with them."""
