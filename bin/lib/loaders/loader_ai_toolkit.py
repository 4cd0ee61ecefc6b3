"""ai-toolkit's network, which goes on with an adapter that it, or somebody else, has trained.

Of its model classes only what they do with an adapter's names is run: the rest needs a GPU's libraries.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from stubs import stub

_ABSENT = (
    *("torchvision", "cv2", "lpips", "k_diffusion", "albumentations", "torchaudio", "toml", "oyaml", "omegaconf"),
    *("controlnet_aux", "kornia", "clip", "open_clip", "timm", "dotenv", "torchao", "av", "librosa", "matplotlib"),
    *("flatten_json", "optimum", "prodigyopt"),
)
_DOWN, _UP = ("lora_A.weight", "lora_down.weight"), ("lora_B.weight", "lora_up.weight")
_CONVERSION = "convert_lora_weights_before_load"


def start(source: str) -> None:
    """Let it be imported."""
    stub(_ABSENT)
    sys.path.insert(0, source)


def load(toy: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the weights with the adapter added, under diffusers' names.

    Raises:
        NotImplementedError: It has a network of its own for this family.
    """
    import diffusers
    from safetensors.torch import load_file
    from toolkit.lora_special import LoRASpecialNetwork

    adapter = load_file(job["file"])
    ranks = {tensor.shape[0] for name, tensor in adapter.items() if name.endswith(_DOWN)}
    if len(ranks) != 1 or not all(name.endswith((*_DOWN, *_UP, ".alpha")) for name in adapter):
        raise NotImplementedError
    model = getattr(diffusers, toy.diffusers).from_pretrained(job["model"])
    network = LoRASpecialNetwork(
        [],
        model,
        lora_dim=ranks.pop(),
        train_text_encoder=False,
        is_transformer=True,
        transformer_only=False,
        target_lin_modules=[type(model).__name__],
        base_model=(own := _Model(toy.ai_toolkit)),
        is_flux=own.is_flux,
    )
    network.apply_to([], model, False, True)
    if network.load_weights(job["file"]):
        raise ValueError("tensors are left over")
    weights = dict(load_file(next(Path(job["model"]).glob("*.safetensors"))))
    for module in network.get_all_modules():
        name = module.lora_name.replace("$$", ".").removeprefix("transformer.") + ".weight"
        added = module.scale * (module.lora_up.weight.detach() @ module.lora_down.weight.detach())
        weights[name] = weights[name] + added
    return weights


class _Model:
    """What the network asks of ai-toolkit's model."""

    use_old_lokr_format = False
    is_transformer = True
    arch = "toy"

    def __init__(self, settings: dict[str, str]) -> None:
        self.is_flux = settings.get("kind") == "flux"
        self.convert_lora_weights_before_load: Callable[..., Any] = lambda tensors: tensors
        if path := settings.get("conversion"):
            self.convert_lora_weights_before_load = lambda tensors: _function_in(path)(self, tensors)

    def get_transformer_block_names(self) -> None:
        """Of all blocks."""


def _function_in(path: str) -> Callable[..., Any]:
    """Return ai-toolkit's own function from a file of a model that cannot be imported here."""
    file = next(each for root in sys.path if (each := Path(root) / path).exists())
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == _CONVERSION)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any("convert" in each.name for each in node.names):
            package = ".".join(Path(path).parts[:-1]) if node.level else ""
            module = import_module(".".join(filter(None, (package, node.module))))
            known |= {each.name: getattr(module, each.name) for each in node.names}
    exec(compile(ast.Module([wanted], []), str(file), "exec"), known)
    found: Callable[..., Any] = known[_CONVERSION]
    return found
