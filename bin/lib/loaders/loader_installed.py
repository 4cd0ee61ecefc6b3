"""diffusers' pipelines and PEFT, as installed: they load into diffusers' model, and merge."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


def start(source: str) -> None:
    """Import nothing yet: they are installed."""
    del source
    warnings.simplefilter("ignore")


class Pipeline:
    """The least that diffusers' mixins ask of a pipeline."""

    lora_scale = 1.0
    hf_device_map = None

    def __init__(self, **components: Any) -> None:
        from torch import nn

        self.components = components
        for name in ("text_encoder", "text_encoder_2"):
            setattr(self, name, nn.Module())
        for name, component in components.items():
            setattr(self, name, component)


def load(toy: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the weights that PEFT or a pipeline of diffusers makes of a file, by the job's loader."""
    import diffusers
    import diffusers.loaders.lora_pipeline as pipelines
    from peft import PeftModel
    from toys import resized

    file = Path(job["file"])
    model = getattr(diffusers, toy.diffusers).from_pretrained(job["model"])
    if job["loader"] == "peft":
        return dict(PeftModel.from_pretrained(model, file.parent).merge_and_unload().state_dict())
    for name in dir(pipelines):
        if name.startswith("_convert"):
            setattr(pipelines, name, resized(getattr(pipelines, name), toy.widths))
    pipeline = type("Loading", (Pipeline, getattr(pipelines, toy.mixin)), {})(**{toy.component: model})
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    if getattr(model, "peft_config", None):
        model.fuse_lora()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
