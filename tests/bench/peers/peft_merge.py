"""merge_and_unload in memory, as PEFT's documentation shows it. usage: BASE_DIR ADAPTER_DIR OUT_DIR"""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
