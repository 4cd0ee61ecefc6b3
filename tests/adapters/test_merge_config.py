"""Merges that cast: the config beside the weights, and what a dry run says of the files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools import api

CONFIG = b'{\n  "model_type": "llama",\n  "text_config": {"torch_dtype": "float32"},\n  "torch_dtype": "float32"\n}\n'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    directory = tmp_path / "base"
    directory.mkdir()
    weights = {f"model.layers.{i}.self_attn.q_proj.weight": rng.normal(size=(8, 8)).astype("f4") for i in range(2)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes(CONFIG)
    return directory


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    directory = tmp_path / "adapter"
    directory.mkdir()
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{path}.lora_{side}.weight": rng.normal(size=shape) for side, shape in (("A", (2, 8)), ("B", (8, 2)))}
    save_file({name: value.astype("f4") for name, value in factors.items()}, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def sizes_of(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("dtype", ["keep", "bf16", "f32"])
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_merge_writes_the_config_and_the_files_of_its_plan(
    kind: str, dtype: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    source, out = base, tmp_path / "out"
    if kind == "dcp":
        source = tmp_path / "run"
        api.shard(base, source, mesh="dp_shard=2")
    planned = api.merge_lora(source, adapter, out, dtype=dtype, dry_run=True)
    result = api.merge_lora(source, adapter, out, dtype=dtype)
    wanted = CONFIG.replace(b"float32", b"bfloat16") if dtype == "bf16" else CONFIG
    assert (out / "config.json").read_bytes() == wanted
    said = "config.json now has 'bfloat16', not 'float32': the weights were cast"
    assert (said in result.notes) == (said in planned.notes) == (dtype == "bf16")
    assert dict(result.files) == sizes_of(out)
    assert [name for name, _ in planned.files] == [name for name, _ in result.files]
    rough = {".metadata", "ckpt_manifest.json"} if kind == "dcp" else set()
    assert {row for row in planned.files if row[0] not in rough} <= set(result.files)
    assert api.verify(out).findings == ()
