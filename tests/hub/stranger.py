"""A stranger: a process that knows a repository and the hub's address, loads what is there, and notes what it computes.

    python -m hub.stranger OUT.safetensors KIND:MODEL:CODE …

CODE is what the card says: for `card` a whole block, for `image` the line that loads; for `auto` it is the repository.
"""

from __future__ import annotations

import sys
import warnings

import torch
import toys
from adapters import families
from safetensors.torch import save_file


def card(model: str, code: str) -> torch.Tensor:
    """Run the card's block for PEFT, which only warns when keys do not match."""
    # What the comment of a card without a known class asks for.
    found = {"base": toys.build("llama") if model == "guide" else families.build(model)}
    with warnings.catch_warnings(action="error"):
        for harmless in ("fan_in_fan_out|.*is_gradient_checkpointing|.*meta parameter", "Failed to load the CUDA"):
            warnings.filterwarnings("ignore", message=harmless)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        exec(code, found)
    return families.outputs(found["model"].eval(), model)


def auto(model: str, code: str) -> torch.Tensor:
    """Load by the repository's own config: for an adapter base and class."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    loader = AutoModelForCausalLM if model == "guide" else AutoPeftModelForCausalLM
    return families.outputs(loader.from_pretrained(code).eval(), model)


def image(model: str, code: str) -> torch.Tensor:
    """Load as the line of the card says into a pipeline of diffusers'."""
    from adapters.image_models import COMPONENT, MODELS
    from adapters.test_diffusers import MIXIN, pipeline_of

    make, inputs = MODELS[model]
    torch.manual_seed(0)
    base = make()
    exec(code, {"pipeline": pipeline_of(MIXIN[model], **{COMPONENT[model]: base})})
    torch.manual_seed(1)
    with torch.no_grad():
        return base(**inputs(), return_dict=False)[0]


if __name__ == "__main__":
    found = {}
    for number, job in enumerate(sys.argv[2:]):
        kind, model, code = job.split(":", 2)
        found[str(number)] = {"card": card, "auto": auto, "image": image}[kind](model, code).contiguous()
    save_file(found, sys.argv[1])
