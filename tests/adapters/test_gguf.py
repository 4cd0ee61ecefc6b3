"""Adapters of llama.cpp: what ckpt writes against llama.cpp's rules and the gguf package, read back and judged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.base.gguf_names import architecture_of, names_of
from ckpt_tools.checkpoint.formats import gguf
from ckpt_tools.checkpoint.names.keymap import load_key_maps
from ckpt_tools.errors import CkptError, UnreadableError, UnsupportedError, UsageError
from ckpt_tools.storage.source import LocalSource

HEADS, GROUPS, HIDDEN, VOCAB, LAYERS = 4, 2, 32, 40, 2
ROWS = {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2, "o_proj": HIDDEN}
FEED = {"gate_proj": (48, HIDDEN), "up_proj": (48, HIDDEN), "down_proj": (HIDDEN, 48)}
Tensors = dict[str, np.ndarray]


def shapes() -> dict[str, tuple[int, int]]:
    found = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.self_attn.{name}": (rows, HIDDEN) for name, rows in ROWS.items()}
        found |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in FEED.items()}
    return found


def make_base(path: Path, kind: str = "llama", **config: object) -> Path:
    path.mkdir()
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes().items()}
    save_file(weights, path / "model.safetensors")
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": LAYERS}
    told = {"model_type": kind, "tie_word_embeddings": False, **heads, **config}
    (path / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return path


def make_adapter(path: Path, ranks: dict[str, int], dtype: type = np.float32, **config: object) -> tuple[Path, Tensors]:
    """Write a PEFT adapter of these modules; return it, and the change of every weight."""
    path.mkdir()
    rng = np.random.default_rng(1)
    tensors, changes = {}, {}
    for name, rank in ranks.items():
        out, inputs = shapes()[name]
        up, down = (rng.normal(size=size).astype(dtype) for size in ((out, rank), (rank, inputs)))
        changes[name] = config["alphas"][name] / rank**0.5 if "alphas" in config else 8 / rank  # type: ignore[index]
        changes[name] = changes[name] * up.astype(np.float64) @ down.astype(np.float64)
        if name == "model.embed_tokens":
            tensors[f"base_model.model.{name}.lora_embedding_A"] = np.ascontiguousarray(up.T)
            tensors[f"base_model.model.{name}.lora_embedding_B"] = np.ascontiguousarray(down.T)
        else:
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    alphas = config.pop("alphas", {})
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": bool(alphas), "target_modules": [*ranks]}
    told |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    (path / "adapter_config.json").write_text(json.dumps(told))
    return path, changes


def parse(path: Path) -> tuple[Tensors, dict[str, str]]:
    with LocalSource(str(path.parent)) as source:
        opened = gguf.FORMAT.open(source, {path.name: path.stat().st_size}, path=str(path))
        content = path.read_bytes()
        kinds = {"F32": np.float32, "F16": np.float16}
        return {
            each.fqn: np.frombuffer(
                content, kinds[each.dtype.name], each.num_elems, each.chunks[0].span.offset
            ).reshape(each.shape)
            for each in opened.checkpoint.tensors
        }, dict(opened.metadata)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's `permute`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def change_in_llama_cpp(path: Path, name: str) -> np.ndarray:
    """What llama.cpp adds to the weight of this name: alpha over the columns of lora_b, and 1 for an alpha of 0."""
    tensors, metadata = parse(path)
    down, up = (tensors[f"{name}.lora_{side}"].astype(np.float64) for side in "ab")
    alpha = float(metadata[gguf.ALPHA])
    product = down @ up.T if name == "token_embd.weight" else up @ down
    return product * (alpha / up.shape[1] if alpha else 1)


ATTENTION = {f"model.layers.1.self_attn.{part}_proj": 4 for part in "qkvo"}


@pytest.mark.parametrize(("kind", "is_interleaved"), [("llama", True), ("mistral", True), ("qwen2", False)])
@pytest.mark.parametrize("groups", [GROUPS, None])
def test_llama_cpp_adds_what_was_trained(tmp_path: Path, kind: str, is_interleaved: bool, groups: int | None) -> None:
    base = make_base(tmp_path / "base", kind, num_key_value_heads=groups)
    ranks = {**ATTENTION, "model.embed_tokens": 4, "lm_head": 4, "model.layers.0.mlp.down_proj": 4}
    adapter, changes = make_adapter(tmp_path / "adapter", ranks)
    assert api.export_lora(adapter, tmp_path / "out", to="gguf", base=base).ok
    file = tmp_path / "out" / "lora.gguf"
    places = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    for name, place in places.items():
        wanted = changes[f"model.layers.1.self_attn.{name}"]
        if is_interleaved and name in ("q_proj", "k_proj"):
            wanted = interleaved(wanted, HEADS if name == "q_proj" else groups or HEADS)
        np.testing.assert_allclose(change_in_llama_cpp(file, f"blk.1.{place}.weight"), wanted, rtol=1e-12)
    others = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.0.ffn_down": "model.layers.0.mlp.down_proj"}
    for place, name in others.items():
        np.testing.assert_allclose(change_in_llama_cpp(file, f"{place}.weight"), changes[name], rtol=1e-12)
    architecture = {"mistral": "llama"}.get(kind, kind)
    said = {"general.architecture": architecture, "general.type": "adapter", "adapter.type": "lora", gguf.ALPHA: "8.0"}
    assert parse(file)[1] == said
    check = api.check_lora(file, base=base)
    assert check.verdict == "loads"
    assert check.judges == ("llama.cpp",)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_one_alpha_says_the_scale_of_every_module(tmp_path: Path, dtype: type) -> None:
    """rsLoRA, and ranks and alphas of their own: a factor that is no power of two makes B float32."""
    ranks = {f"model.layers.{layer}.self_attn.v_proj": rank for layer, rank in enumerate((4, 2))}
    ranks |= {"model.layers.0.self_attn.o_proj": 4, "model.layers.1.self_attn.o_proj": 16}
    alphas = dict(zip(ranks, (8, 8, 24, 16), strict=True))
    adapter, changes = make_adapter(tmp_path / "adapter", ranks, dtype, alphas=alphas)
    api.export_lora(adapter, tmp_path / "out", to="gguf", base=make_base(tmp_path / "base"))
    for name, wanted in changes.items():
        place = name.replace("model.layers", "blk").replace("self_attn.v_proj", "attn_v")
        place = place.replace("self_attn.o_proj", "attn_output")
        found = change_in_llama_cpp(tmp_path / "out" / "lora.gguf", f"{place}.weight")
        assert np.abs(found - wanted).max() < 2e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_way_back_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    base = make_base(tmp_path / "base", kind)
    adapter, _ = make_adapter(tmp_path / "adapter", {**ATTENTION, "model.embed_tokens": 4})
    api.export_lora(adapter, tmp_path / "out", to="gguf", base=base)
    back = api.export_lora(tmp_path / "out" / "lora.gguf", tmp_path / "back", base=base)
    assert back.ok
    for name in ("adapter_config.json", "config.yaml"):  # of another adapter: llama.cpp reads neither
        (tmp_path / "out" / name).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 99, "use_rslora": true}')
    assert api.export_lora(tmp_path / "out", tmp_path / "again", base=base).config == back.config
    assert back.config["lora_alpha"].value == 8
    assert_came_back(tmp_path, tmp_path / "out" / "lora.gguf")


def assert_came_back(path: Path, written: Path) -> None:
    """Are adapter's tensors those of back, and is `written`, between them, merged to the same bytes?"""
    one, other = (load_file(path / each / "adapter_model.safetensors") for each in ("adapter", "back"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    for source, merged in ((path / "adapter", "a"), (written, "b")):
        api.merge_lora(path / "base", source, path / merged)
    assert (path / "a" / "model.safetensors").read_bytes() == (path / "b" / "model.safetensors").read_bytes()


def test_refusals(tmp_path: Path) -> None:
    base, tied = make_base(tmp_path / "base"), make_base(tmp_path / "tied", tie_word_embeddings=True)
    foreign = make_base(tmp_path / "foreign", "gpt_bigcode")
    plain, _ = make_adapter(tmp_path / "plain", ATTENTION)
    head, _ = make_adapter(tmp_path / "head", {"lm_head": 4})
    embedding, _ = make_adapter(tmp_path / "embedding", {"model.embed_tokens": 4})
    other = make_base(tmp_path / "other", "qwen2")
    for source, given, error, said in (
        (plain, None, UsageError, "depend on the base's config.json"),
        (plain, foreign, UnsupportedError, "no map to llama.cpp's names for models of the type gpt_bigcode"),
        (head, tied, UsageError, "ties its head"),
        (embedding, tied, UsageError, "ties its head"),
    ):
        with pytest.raises(error, match=said):
            api.export_lora(source, tmp_path / "out", to="gguf", base=given)
    tensors = load_file(plain / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, plain / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"llama\.cpp has no place for magnitude"):
        api.export_lora(plain, tmp_path / "out", to="gguf", base=base)
    api.export_lora(head, tmp_path / "out", to="gguf", base=base)
    with pytest.raises(UsageError, match="order of their rows"):
        api.export_lora(tmp_path / "out" / "lora.gguf", tmp_path / "back")
    with pytest.raises(UsageError, match="'llama', and the base is 'qwen2'"):
        api.merge_lora(other, tmp_path / "out" / "lora.gguf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


F32, F16, BF16, Q8_0 = 0, 1, 30, 8
HEAD = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", gguf.ALPHA: 8.0}
PAIR = {"blk.0.attn_v.weight.lora_a": (4, HIDDEN), "blk.0.attn_v.weight.lora_b": (HIDDEN // 2, 4)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(path: Path, tensors: dict[str, tuple[int, ...]], head: dict[str, object] = HEAD, kind: int = F32) -> Path:
    """Write a file by hand, of ones."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(head))
    for key, value in head.items():
        out += text(key)
        out += struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<I", 8) + text(str(value))
    data = b""
    for name, shape in tensors.items():
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        count = int(np.prod(shape))
        ones = {F32: b"\0\0\x80\x3f", F16: b"\0\x3c", BF16: b"\x80\x3f"}.get(kind, b"") * count
        data += ones or (struct.pack("<e", 0.5) + b"\2" * 32) * (count // 32)
        data += bytes(-len(data) % 32)
    path.write_bytes(out + bytes(-len(out) % 32) + data)
    return path


def verdict(path: Path, base: Path | None) -> tuple[str, str]:
    check = api.check_lora(path, base=base, loaders=["llama.cpp"])
    return check.verdict, " ".join(each.what for each in check.findings if each.severity == "error")


def test_verdicts_are_llama_cpps(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    file, (down, up) = tmp_path / "a.gguf", PAIR
    assert verdict(write(file, PAIR), base) == ("loads", "")
    assert verdict(write(file, PAIR), None)[0] == "unknown"
    for tensors, head, said in (
        ({**PAIR, "blk.0.attn_norm.weight": (HIDDEN,)}, HEAD, "leaves out norms"),
        ({**PAIR, "blk.0.attn_v.bias": (HIDDEN,)}, HEAD, "unexpected suffix"),
        ({down: PAIR[down]}, HEAD, "missing one half"),
        (PAIR, {**HEAD, "adapter.type": "lokr"}, "adapter.type must be 'lora'"),
        (PAIR, {key: HEAD[key] for key in HEAD if key != "general.type"}, "general.type must be 'adapter'"),
        ({down: PAIR[down], up: (HIDDEN, 4)}, HEAD, "the base"),
        ({down: PAIR[down], up: (HIDDEN // 2, 3)}, HEAD, "do not fit|rank"),
        (
            {"output.weight.lora_a": (4, HIDDEN), "output.weight.lora_b": (VOCAB, 4)},
            HEAD,
            "output.weight does not exist",
        ),
        (
            {name.replace(".0.", ".7."): shape for name, shape in PAIR.items()},
            HEAD,
            "blk.7.attn_v.weight does not exist",
        ),
        (PAIR, {**HEAD, "general.architecture": "qwen2"}, "is for 'qwen2', the base is 'llama'"),
    ):
        found = verdict(write(file, tensors, head), base)
        assert found[0] == "fails", (said, found)
        assert any(each in found[1] for each in said.split("|")), found
    experts = {f"blk.0.ffn_up_exps.weight.lora_{side}": (4, 4) for side in "ab"}  # which llama.cpp may have
    assert verdict(write(file, {**PAIR, **experts}), base) == ("unknown", "")
    assert verdict(write(file, PAIR), make_base(tmp_path / "foreign", "gpt_bigcode")) == ("unknown", "")
    for loader in ("peft", "mlx", "vllm", "comfyui"):
        assert api.check_lora(write(file, PAIR), base=base, loaders=[loader]).verdict == "fails"


@pytest.mark.parametrize(("alpha", "wanted"), [(8.0, 2.0), (0.0, 1.0), (None, 1.0)])
def test_an_alpha_of_zero_is_a_scale_of_one(tmp_path: Path, alpha: float | None, wanted: float) -> None:
    head = {key: value for key, value in {**HEAD, gguf.ALPHA: alpha}.items() if value is not None}
    base, file = make_base(tmp_path / "base"), write(tmp_path / "a.gguf", PAIR, head)
    merged = api.merge_lora(base, file, tmp_path / "out")
    assert merged.published
    name = "model.layers.0.self_attn.v_proj.weight"
    before, after = (load_file(tmp_path / each / "model.safetensors")[name] for each in ("base", "out"))
    np.testing.assert_allclose(after - before, wanted * 4, rtol=1e-5)


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
def test_types(tmp_path: Path, kind: int) -> None:
    pair = {"blk.0.attn_v.weight.lora_a": (32, HIDDEN), "blk.0.attn_v.weight.lora_b": (HIDDEN // 2, 32)}
    file = write(tmp_path / "a.gguf", pair, kind=kind)
    api.export_lora(file, tmp_path / "out", base=make_base(tmp_path / "base"), dtype="f32")
    assert all((each == 1).all() for each in load_file(tmp_path / "out" / "adapter_model.safetensors").values())


def test_other_quantisations_are_unsupported_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is Q4_K; ckpt reads adapters in F32, F16, BF16 and Q8_0"):
        api.check_lora(write(tmp_path / "a.gguf", PAIR, kind=12))
    experts = {f"blk.0.ffn_up_exps.weight.lora_{side}": (2, 4, 4) for side in "ab"}
    with pytest.raises(UnsupportedError, match="has 3 dims: factors of stacked experts"):
        api.check_lora(write(tmp_path / "a.gguf", {**PAIR, **experts}))
    with pytest.raises(UnsupportedError, match="a GGUF file of a model, not of an adapter"):
        api.check_lora(write(tmp_path / "a.gguf", PAIR, {**HEAD, "general.type": "model"}))


def test_overwrite_replaces_an_adapter_and_no_model(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter, _ = make_adapter(tmp_path / "adapter", ATTENTION)
    for _ in range(2):
        assert api.export_lora(adapter, tmp_path / "out", to="gguf", base=base, overwrite=True).ok
    model = write(tmp_path / "out" / "lora.gguf", PAIR, {**HEAD, "general.type": "model"})
    with pytest.raises(UnsupportedError, match="a GGUF file of a model"):
        api.export_lora(adapter, tmp_path / "out", to="gguf", base=base, overwrite=True)
    assert model.exists()


def attempt(path: Path) -> None:
    """Read a damaged file: an error of ckpt's, or a result; anything else is a fault."""
    try:
        api.check_lora(path)
    except CkptError:
        return


def test_every_truncation_is_unreadable(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf", PAIR).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(content), 7):
        cut.write_bytes(content[:length])
        with pytest.raises(UnreadableError, match=r"not a GGUF file|the header does not end|the file is truncated"):
            api.check_lora(cut)
    cut.write_bytes(content[:-7])
    with pytest.raises(UnreadableError, match="the file is truncated"):
        api.export_lora(cut, tmp_path / "out", base=make_base(tmp_path / "base"), dry_run=True)


def test_what_no_file_may_hold(tmp_path: Path) -> None:
    good, file = write(tmp_path / "a.gguf", PAIR).read_bytes(), tmp_path / "b.gguf"
    first, second = (text(name) for name in PAIR)
    place = good.index(second) + len(second) + 24  # the offset of the second tensor
    twice = text("adapter.type") + struct.pack("<I", 8) + text("lora")
    for content, said in (
        (good.replace(second, first), "the same name"),
        (good[:place] + struct.pack("<Q", 0) + good[place + 8 :], "where none can begin"),
        (good[:place] + struct.pack("<Q", 517) + good[place + 8 :], "where none can begin"),
        (good.replace(struct.pack("<QQI", HIDDEN, 4, 0), struct.pack("<QQI", 0, 1 << 63, 0)), "impossible shape"),
        (good.replace(struct.pack("<IQQ", 3, 2, 4), struct.pack("<IQQ", 3, 2, 5)).replace(twice, twice * 2), "twice"),
        (b"GGUG" + good[4:], "not a GGUF file"),
        (good.replace(b"GGUF\3", b"GGUF\1"), "of version 1"),
    ):
        assert content != good, said
        file.write_bytes(content)
        with pytest.raises(UnreadableError, match=said):
            api.check_lora(file)


def test_no_damage_to_the_header_is_a_traceback(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf", PAIR).read_bytes()
    start = content.index(b"blk.0.attn_v.weight.lora_b") + 70
    bad = tmp_path / "bad.gguf"
    for at in range(start):
        for value in (0, 0x7F, 0xFF, content[at] ^ 1, content[at] ^ 0x80):
            bad.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            attempt(bad)


def test_claims_beyond_the_file_take_no_memory(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
    tensor = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("x.weight.lora_a")
    huge = struct.pack("<Q", 1 << 62)
    nested = struct.pack("<I", 9) + (struct.pack("<I", 9) + struct.pack("<Q", 1)) * 2000
    for damage in (
        b"GGUF" + struct.pack("<I", 3) + huge + huge,
        head + struct.pack("<I", 8) + huge,
        head + struct.pack("<II", 9, 0) + huge,
        head + struct.pack("<II", 9, 8) + huge,
        head + nested,
        tensor + struct.pack("<I", 4) + huge * 4 + struct.pack("<IQ", 0, 0),
        tensor + struct.pack("<I", 1 << 31),
    ):
        (tmp_path / "bad.gguf").write_bytes(damage)
        with pytest.raises(UnreadableError):
            api.check_lora(tmp_path / "bad.gguf")


def test_the_gguf_package_reads_the_same_bytes(tmp_path: Path) -> None:
    reference = pytest.importorskip("gguf", reason="the gguf package, llama.cpp's own reader, is not installed")
    adapter, _ = make_adapter(tmp_path / "adapter", ATTENTION)
    api.export_lora(adapter, tmp_path / "out", to="gguf", base=make_base(tmp_path / "base"))
    file = tmp_path / "out" / "lora.gguf"
    reader, (tensors, metadata) = reference.GGUFReader(file), parse(file)
    assert {each.name for each in reader.tensors} == tensors.keys()
    for each in reader.tensors:
        assert np.array_equal(each.data, tensors[each.name])
        assert each.tensor_type == reference.GGMLQuantizationType.F32
    assert reader.fields[gguf.ALPHA].contents() == float(metadata[gguf.ALPHA])
    assert reader.fields["general.type"].contents() == "adapter"


def test_names_are_those_of_the_gguf_package() -> None:
    reference = pytest.importorskip("gguf", reason="the gguf package, llama.cpp's table of names, is not installed")
    by_name = {name: arch for arch, name in reference.MODEL_ARCH_NAMES.items()}
    for kind, key_map in load_key_maps("gguf").items():
        config = {"model_type": kind}
        table = reference.get_tensor_name_map(by_name[architecture_of(config)], 2)
        weights = [line.hub[0].replace("*", "1") for line in key_map.section.lines]
        found = {hub: name for hub, name, _ in names_of(weights, config)}
        assert len(found) == len(weights)
        for hub, name in found.items():
            assert name == table.get_name(hub, try_suffixes=(".weight",)), kind
