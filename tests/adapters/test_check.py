"""`ckpt check-lora`: every loader's rules held against the loader itself where it is installed, and the known pains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters.image_models import COMPONENT, MODELS, adapter, linears, lora
from adapters.test_diffusers import load as load_in_diffusers
from safetensors.torch import save_file

from ckpt_tools.adapters.loaders import AdapterFile, TensorHead, simulate
from ckpt_tools.adapters.naming import to_target
from ckpt_tools.dtypes import BY_TORCH_NAME

Tensors = dict[str, torch.Tensor]
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


def describe(tensors: Tensors, **others: object) -> AdapterFile:
    heads = {
        name: TensorHead(shape=tuple(tensor.shape), dtype=BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")])
        for name, tensor in tensors.items()
    }
    return AdapterFile(**({"file": DIFFUSERS_FILE, "tensors": heads} | others))


# diffusers: simulated against itself


def layers(name: str, *, only: Callable[[str], bool] = lambda _: True, **options: object) -> list:
    torch.manual_seed(0)
    return [lora(path, shape, **options) for path, shape in linears(MODELS[name][0]()).items() if only(path)]


def written(name: str, target: str, only: Callable[[str], bool] = lambda _: True, **options: object) -> Tensors:
    return dict(to_target(adapter(layers(name, only=only, **options)), target, architecture=name).tensors)


def in_blocks(path: str) -> bool:
    return "blocks" in path


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def with_alphas(tensors: Tensors, dtype: torch.dtype = torch.float32) -> Tensors:
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    return tensors | {f"{module}.alpha": torch.tensor(2, dtype=dtype) for module in modules}


def with_dora_scale(tensors: Tensors) -> Tensors:
    ups = {name: tensor for name, tensor in tensors.items() if name.endswith(".lora_up.weight")}
    return tensors | {
        name.replace("lora_up.weight", "dora_scale"): torch.ones(tensor.shape[0], 1) for name, tensor in ups.items()
    }


def loha(name: str) -> Tensors:
    tensors: Tensors = {}
    prefix = "diffusion_model.double_blocks.0.img_attn.proj" if "flux" in name else "lora_unet_middle_block_1_proj_in"
    for role in ("w1_a", "w2_a"):
        tensors[f"{prefix}.hada_{role}"] = torch.randn(32, 2)
    for role in ("w1_b", "w2_b"):
        tensors[f"{prefix}.hada_{role}"] = torch.randn(2, 32)
    return tensors


def lokr() -> Tensors:
    module = "diffusion_model.double_blocks.0.img_attn.proj"
    return {f"{module}.lokr_w1": torch.randn(4, 4), f"{module}.lokr_w2": torch.randn(8, 8)}


def has_encoder(name: str) -> Tensors:
    base = written(name, "diffusers", in_blocks)
    layer = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    return base | {f"{layer}.lora_A.weight": torch.randn(2, 8), f"{layer}.lora_B.weight": torch.randn(8, 2)}


CASES: dict[str, tuple[str, Callable[[], Tensors]]] = {
    **{f"{name}: diffusers' names": (name, lambda name=name: written(name, "diffusers")) for name in MODELS},
    **{f"{name}: kohya's names": (name, lambda name=name: written(name, "kohya", in_blocks)) for name in MODELS},
    **{f"{name}: kohya's names, all": (name, lambda name=name: written(name, "kohya")) for name in MODELS},
    **{f"{name}: ComfyUI's names": (name, lambda name=name: written(name, "comfyui", in_blocks)) for name in MODELS},
    **{f"{name}: ComfyUI's names, all": (name, lambda name=name: written(name, "comfyui")) for name in MODELS},
    **{
        f"{name}: float alphas": (name, lambda name=name: with_alphas(written(name, "diffusers", in_blocks)))
        for name in MODELS
    },
    **{
        f"{name}: integer alphas": (
            name,
            lambda name=name: with_alphas(written(name, "diffusers", in_blocks), torch.int64),
        )
        for name in MODELS
    },
    **{
        f"{name}: DoRA": (name, lambda name=name: written(name, "diffusers", lambda p: p.endswith("to_q"), dora=True))
        for name in MODELS
    },
    **{
        f"{name}: dora_scale": (name, lambda name=name: with_dora_scale(written(name, "kohya", in_blocks)))
        for name in MODELS
    },
    **{
        f"{name}: lora_down under diffusers' paths": (
            name,
            lambda name=name: renamed(
                written(name, "diffusers", in_blocks), ("lora_A", "lora_down"), ("lora_B", "lora_up")
            ),
        )
        for name in MODELS
    },
    **{
        f"{name}: PEFT's names": (
            name,
            lambda name=name: renamed(
                written(name, "diffusers", in_blocks), (f"{COMPONENT[name]}.", "base_model.model.")
            ),
        )
        for name in MODELS
    },
    **{
        f"{name}: no prefix": (
            name,
            lambda name=name: renamed(written(name, "diffusers", in_blocks), (f"{COMPONENT[name]}.", "")),
        )
        for name in MODELS
    },
    **{
        f"{name}: lora_A under native names": (
            name,
            lambda name=name: renamed(
                {k: v for k, v in written(name, "comfyui", in_blocks).items() if not k.endswith(".alpha")},
                ("lora_down", "lora_A"),
                ("lora_up", "lora_B"),
            ),
        )
        for name in MODELS
    },
    **{f"{name}: LoHa": (name, lambda name=name: loha(name)) for name in ("flux1", "flux2", "sdxl")},
    "flux2: LoKr": ("flux2", lokr),
    "flux1: LoKr": ("flux1", lokr),
    "flux1: MLP of the text encoder": ("flux1", lambda: has_encoder("flux1")),
    "sdxl: old processors": (
        "sdxl",
        lambda: renamed(
            written("sdxl", "diffusers", lambda p: p.endswith(("to_q", "to_k"))),
            (".to_q.lora_A", ".processor.to_q_lora.down"),
            (".to_q.lora_B", ".processor.to_q_lora.up"),
            (".to_k.lora_A", ".processor.to_k_lora.down"),
            (".to_k.lora_B", ".processor.to_k_lora.up"),
        ),
    ),
}


def really(name: str, tensors: Tensors, tmp_path: Path) -> set[str] | None:
    """Load with diffusers; the modules that have an adapter with something in it, or None when it raises."""
    file = tmp_path / DIFFUSERS_FILE
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    model = MODELS[name][0]()
    try:
        load_in_diffusers(name, file, **{COMPONENT[name]: model})
    except Exception:  # whatever it raises: the question is whether it does
        return None
    changed = set()
    for path, module in model.named_modules():
        for attribute in ("lora_B", "lokr_w2"):
            factors = getattr(module, attribute, None)
            if factors and any(bool(getattr(f, "weight", f).ne(0).any()) for f in factors.values()):
                changed.add(path)
    return changed


@pytest.mark.parametrize("case", CASES)
def test_simulated_diffusers_is_the_real_one(case: str, tmp_path: Path) -> None:
    name, make = CASES[case]
    tensors = make()
    if case == "flux1: kohya's names" or case == "flux1: ComfyUI's names" or case == "flux1: dora_scale":
        # diffusers has the real widths of the single blocks written in; see test_naming for these.
        tensors = {key: tensor for key, tensor in tensors.items() if "single" not in key}
    if case in ("flux1: kohya's names, all", "flux1: ComfyUI's names, all"):
        tensors = {key: tensor for key, tensor in tensors.items() if "linear1" not in key}
    report = simulate(describe(tensors, architecture=name, is_named=True), "diffusers")
    truth = really(name, tensors, tmp_path)
    assert report.loads is (truth is not None), report.findings
    if truth is not None:
        assert {path.partition(".")[2] for path in report.matched} == truth
