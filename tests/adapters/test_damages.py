"""Damages to an adapter of a language model, as PEFT, llama.cpp and mlx-lm hold it: none is called whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.test_gguf import make_adapter, make_base, parse, shapes
from safetensors.numpy import load_file, save_file

from ckpt_tools import api
from ckpt_tools.errors import CkptError

Tensors = dict[str, np.ndarray]
Damage = Callable[[Tensors, dict[str, Any]], None]
"""Changes the tensors, and the configuration or the header; their formats are `FORMATS`."""
FORMATS = {"peft": "adapter_model.safetensors", "vllm": "adapter_model.safetensors",
           "sglang": "adapter_model.safetensors", "mlx": "adapters.safetensors", "gguf": "lora.gguf"}  # fmt: skip
SIDES = {"peft": ("lora_A.weight", "lora_B.weight"), "mlx": ("lora_a", "lora_b"), "gguf": ("lora_a", "lora_b")}


def names_in(tensors: Tensors, end: str, part: str = "") -> list[str]:
    return sorted(name for name in tensors if name.endswith(end) and part in name)


def lost(end: str, *, every: int = 4, part: str = "") -> Damage:
    def damage(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in names_in(tensors, end, part)[::every]:
            del tensors[name]

    return damage


def changed(end: str, make: Callable[[np.ndarray], np.ndarray], *, every: int = 8) -> Damage:
    def damage(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in names_in(tensors, end)[::every]:
            tensors[name] = np.ascontiguousarray(make(tensors[name]))

    return damage


def renamed(old: str, new: str) -> Damage:
    """Exchange two parts of names."""

    def damage(tensors: Tensors, _: dict[str, Any]) -> None:
        moved = {name.replace(old, "\0").replace(new, old).replace("\0", new): each for name, each in tensors.items()}
        tensors.clear()
        tensors.update(moved)

    return damage


def added(name: str, shape: tuple[int, ...]) -> Damage:
    return lambda tensors, _: tensors.update({name: np.ones(shape, np.float32)})


def said(**settings: Any) -> Damage:
    return lambda _, config: config.update(settings)


def unsaid(name: str) -> Damage:
    return lambda _, config: config.pop(name) and None


def parameters(**settings: Any) -> Damage:
    return lambda _, config: config["lora_parameters"].update(settings)


def of_tensors(down: str, up: str) -> Mapping[str, Damage]:
    """What can happen to the factors of any format."""
    return {
        "a down lost": lost(down, every=14),
        "an up lost": lost(up, every=14),
        "every second up lost": lost(up, every=2),
        "downs and ups exchanged": renamed(down, up),
        "a down transposed": changed(down, np.transpose),
        "an up transposed": changed(up, np.transpose),
        "rows of a down lost": changed(down, lambda each: each[:-1]),
        "columns of a down lost": changed(down, lambda each: each[:, :-1]),
        "rows of an up lost": changed(up, lambda each: each[:-1]),
        "a down of NaN": changed(down, partial(np.full_like, fill_value=np.nan)),
        "an infinite number in an up": changed(up, lambda each: each * np.where(each == each.max(), np.inf, 1)),
        "an up of zeros": changed(up, np.zeros_like, every=14),
        "all ups of zeros": changed(up, np.zeros_like, every=1),
        "a down of zeros": changed(down, np.zeros_like, every=14),
        "an empty down": changed(down, lambda each: each[:0]),
        "a flat up": changed(up, np.ravel),
    }


SWAPS = {
    "q_proj and k_proj exchanged": renamed("q_proj", "k_proj"),
    "up_proj and down_proj exchanged": renamed("up_proj", "down_proj"),
    "a layer that the model lacks": renamed("layers.1.", "layers.7."),
    "names of another family": renamed("self_attn.", "attn.attention."),
}
OF_PEFT = {
    "rank doubled": said(r=8, rank_pattern={}),
    "rank 0": said(r=0, rank_pattern={}),
    "no rank": unsaid("r"),
    "alpha 0": said(lora_alpha=0),
    "alpha a text": said(lora_alpha="8"),
    "alpha not a number": said(lora_alpha=float("nan")),
    "alpha enormous": said(lora_alpha=1e9),
    "another type": said(peft_type="LOHA"),
    "a DoRA without magnitudes": said(use_dora=True),
    "a target lost": said(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "targets of another family": said(target_modules=["c_attn", "c_proj"]),
    "a magnitude without DoRA": added("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", (32,)),
    "a bias without lora_bias": added("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", (32,)),
    "one layer lost": lost("weight", every=1, part="layers.1."),
}
OF_SERVERS = {
    "another rank": said(r=2, use_rslora=True),
    "no alpha": unsaid("lora_alpha"),
    "PiSSA": said(init_lora_weights="pissa"),
    "a DoRA without magnitudes": said(use_dora=True),
}
OF_SGLANG = {
    "rsLoRA": said(use_rslora=True),
    "an alpha pattern": said(alpha_pattern={"q_proj": 16}),
    "targets that are a pattern": said(target_modules=".*_proj"),
    "no v_proj beside q_proj": lost("weight", every=1, part="v_proj"),
}
OF_MLX = {
    "rank doubled": parameters(rank=8),
    "scale 0": parameters(scale=0),
    "scale not a number": parameters(scale=float("nan")),
    "keys of others": parameters(keys=["self_attn.q_proj"]),
    "fewer layers": said(num_layers=1),
    "DoRA without magnitudes": said(fine_tune_type="dora"),
    "a full fine-tune": said(fine_tune_type="full"),
    "no parameters": unsaid("lora_parameters"),
    "a whole layer lost": lost("", every=1, part="layers.1."),
}
OF_GGUF = {
    "alpha not a number": said(**{"adapter.lora.alpha": "nan"}),
    "alpha infinite": said(**{"adapter.lora.alpha": "inf"}),
    "alpha enormous": said(**{"adapter.lora.alpha": "1e30"}),
    "another type": said(**{"adapter.type": "lokr"}),
    "a model": said(**{"general.type": "model"}),
    "another architecture": said(**{"general.architecture": "qwen2"}),
    "q and k exchanged": renamed("attn_q.", "attn_k."),
    "up and down exchanged": renamed("ffn_up.", "ffn_down."),
    "a layer that the model lacks": renamed("blk.1.", "blk.7."),
    "a head that is not a pair": added("output.weight", (40, 32)),
}
ALL = {
    **{("peft", name): each for name, each in (of_tensors(*SIDES["peft"]) | SWAPS | OF_PEFT).items()},
    **{("vllm", name): each for name, each in (OF_SERVERS | {"rank 0": OF_PEFT["rank 0"]}).items()},
    **{("sglang", name): each for name, each in (of_tensors(*SIDES["peft"]) | OF_SERVERS | OF_SGLANG).items()},
    ("sglang", "q_proj and k_proj exchanged"): SWAPS["q_proj and k_proj exchanged"],
    **{("mlx", name): each for name, each in (of_tensors(*SIDES["mlx"]) | SWAPS | OF_MLX).items()},
    **{("gguf", name): each for name, each in (of_tensors(*SIDES["gguf"]) | OF_GGUF).items()},
}


@pytest.mark.parametrize("part", ["layers.1.", "self_attn.v_proj"])
def test_mlx_file_of_some_layers_is_whole_if_an_export_says_so(part: str, base: Path, tmp_path: Path) -> None:
    names = [name for name in shapes() if "layers" in name and part not in name]
    adapter, _ = make_adapter(tmp_path / "peft", dict.fromkeys(names, 4))
    api.export_lora(adapter, tmp_path / "mlx", to="mlx", base=base)
    assert judged("mlx", tmp_path / "mlx", base) == "loads"
    file = tmp_path / "mlx/adapters.safetensors"
    save_file(load_file(file), file, metadata={"format": "mlx"})  # as mlx-lm would write it
    assert judged("mlx", tmp_path / "mlx", base) == ("fails" if part == "layers.1." else "loads")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of every layer's modules, in each format; every loader takes it."""
    root = tmp_path_factory.mktemp("whole")
    adapter, _ = make_adapter(root / "peft", dict.fromkeys((name for name in shapes() if "layers" in name), 4))
    config = json.loads((adapter / "adapter_config.json").read_text())
    ends = sorted({name.rpartition(".")[2] for name in config["target_modules"]})
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ends, "rank_pattern": {}}))
    for target in ("mlx", "gguf"):
        api.export_lora(adapter, root / target, to=target, base=base)
    found = {kind: root / (kind if kind in ("mlx", "gguf") else "peft") for kind in FORMATS}
    for kind, path in found.items():
        assert judged(kind, path, base) == "loads", kind
    return found


def judged(kind: str, path: Path, base: Path) -> str:
    source = path / FORMATS[kind] if kind == "gguf" else path
    try:
        return api.check_lora(source, base=base, loaders=[{"gguf": "llama.cpp"}.get(kind, kind)]).verdict
    except CkptError:
        return "no adapter"


def write_gguf(file: Path, tensors: Tensors, header: Mapping[str, str]) -> None:
    """Write them with the package of llama.cpp's authors."""
    import gguf

    writer = gguf.GGUFWriter(file, header["general.architecture"])
    for key in ("general.type", "adapter.type"):
        writer.add_string(key, header[key])
    writer.add_float32("adapter.lora.alpha", float(header["adapter.lora.alpha"]))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("kind", "damage"), ALL, ids=["-".join(key).replace(" ", "-") for key in ALL])
def test_no_damage_is_called_whole(kind: str, damage: str, base: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """Each in the format that a loader reads; `whole` says that it is the damage that is judged."""
    file = whole[kind] / FORMATS[kind]
    if kind == "gguf":
        tensors, config = parse(file)
        ALL[kind, damage](tensors, config)
        write_gguf(tmp_path / file.name, tensors, config)
    else:
        tensors, config = load_file(file), json.loads((whole[kind] / "adapter_config.json").read_text())
        ALL[kind, damage](tensors, config)
        save_file(tensors, tmp_path / file.name, {"format": "pt"})
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert judged(kind, tmp_path, base) != "loads"
