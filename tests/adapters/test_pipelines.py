"""Adapters of several models of a pipeline in one training checkpoint: a text encoder's beside the transformer's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapters.families import save_dcp
from adapters.test_diffusers import clip
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError

FLUX = [f"transformer.{kind}.0.attn.to_q" for kind in ("transformer_blocks", "single_transformer_blocks")]
CLIP = [f"text_encoder.encoder.layers.{layer}.self_attn.q_proj" for layer in range(2)]


def save(path: Path, modules: list[str], *, root: str = "") -> Path:
    """Save random factors as PEFT calls them in the models themselves, or with `root` in its wrappers."""
    generator = torch.Generator().manual_seed(0)

    def factors() -> Iterator[tuple[str, torch.Tensor]]:
        for module in modules:
            component, _, rest = module.partition(".")
            for side, shape in (("A", (2, 32)), ("B", (32, 2))):
                name = f"{component}.{root}{rest}.lora_{side}.default.weight"
                yield name, torch.randn(shape, generator=generator)

    save_dcp(dict(factors()), path)
    return path


def names_in(path: Path) -> set[str]:
    (file,) = path.glob("*.safetensors")
    return {name.rpartition(".lora_")[0] for name in load_file(file)}


@pytest.mark.full
@pytest.mark.parametrize("root", ["", "base_model.model."], ids=["injected", "wrapped"])
def test_every_model_of_a_pipeline_is_exported_for_its_own_loader(root: str, tmp_path: Path) -> None:
    source = save(tmp_path / "dcp", [*FLUX, *CLIP], root=root)
    with pytest.raises(UsageError, match="for 2 models"):
        api.export_lora(source, tmp_path / "both", alpha=4)
    base = clip(with_projection=False)
    with warnings.catch_warnings(action="ignore"):
        base.save_pretrained(tmp_path / "clip")
    for include, options, names in (
        ("text_encoder.**", {"base": tmp_path / "clip"}, CLIP),
        ("text_encoder.**", {}, CLIP),
        ("transformer.**", {}, FLUX),
    ):
        out = tmp_path / f"peft-{len(options)}-{include[:4]}"
        assert api.export_lora(source, out, alpha=4, include=[include], **options).ok
        assert names_in(out) == {f"base_model.model.{name.partition('.')[2]}" for name in names}
        targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
        assert not any(target.startswith(("text_encoder", "transformer.")) for target in targets)
    for to, example in (
        ("diffusers", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"),
        ("comfyui", "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj"),
        ("kohya", "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"),
    ):
        out = tmp_path / to
        assert api.export_lora(source, out, alpha=4, to=to, architecture="flux1").ok
        found = {name.partition(".lora")[0] for name in load_file(next(out.glob("*.safetensors")))}
        assert example in found
        assert api.check_lora(out, loaders=[to], architecture="flux1").verdict != "fails"


@pytest.mark.parametrize(
    ("module", "inner"),
    [
        ("transformer.blocks.0.attn1.to_q", "blocks.0.attn1.to_q"),  # Wan's
        ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),  # GPT-2's
        ("transformer.blocks.0.attn.Wqkv", "transformer.blocks.0.attn.Wqkv"),  # MPT's
        ("unet.mid_block.attentions.0.proj_in", "mid_block.attentions.0.proj_in"),
    ],
)
def test_a_transformer_is_a_pipeline_s_where_its_modules_are(module: str, inner: str, tmp_path: Path) -> None:
    source = save(tmp_path / "dcp", [module])
    api.export_lora(source, tmp_path / "out", alpha=4)
    assert names_in(tmp_path / "out") == {f"base_model.model.{inner}"}
