"""One flipped bit in tensor data, under everything that writes: refused, or named as what was not held."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from corrupt import damage
from formats.saved import save_ranks
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from samples import examples, small_blocks
from torch.distributed.tensor import Replicate, Shard

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Box, split_blocks
from ckpt_tools.convert.job import Conversion
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.plan import chunk_index
from ckpt_tools.transfer.read import Buffers, read_block
from ckpt_tools.transfer.tensor_digest import AsStored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TAKEN = "model.layers.0.mlp.down_proj.weight"
LEFT = "model.layers.0.mlp.up_proj.weight"
BLOCK_BYTES = 300
"""Blocks of what is read and of what is written do not fit."""


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(31, 21),
        LEFT: torch.randn(20, 21, dtype=torch.bfloat16),
        TAKEN: torch.randn(21, 26, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.randn(1, dtype=torch.bfloat16),  # of one rank alone
        "lm_head.weight": torch.randn(31, 21),
    }


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def hf(root: Path) -> Path:
    api.gather(dcp(root), root / "hf")
    return root / "hf"


def dcp(root: Path) -> Path:
    api.shard(write(root / "plain", state(), {}), root / "dcp", mesh="dp_shard=3")
    return root / "dcp"


def items(root: Path) -> Path:
    damage.forget_manifest(dcp(root))
    return root / "dcp"


def zipped(root: Path) -> Path:
    torch.save(state(), root / "zip.pt")
    return root / "zip.pt"


def views(root: Path) -> Path:
    whole = torch.randn(2000).to(torch.bfloat16)
    torch.save(state() | {TAKEN: whole[:546].view(21, 26), LEFT: whole[900:1320].view(20, 21)}, root / "views.pt")
    return root / "views.pt"


def ranks(root: Path) -> Path:
    save_ranks(root / "ranks", state(), {"fsdp": 2}, lambda name: [Replicate() if "norm" in name else Shard(0)])
    return root / "ranks"


def wide(root: Path) -> Path:
    torch.manual_seed(1)
    tensors = {name: torch.randn(256, 128, dtype=torch.bfloat16) for name in (LEFT, TAKEN)}
    api.shard(write(root / "narrow", tensors, {"model_type": "llama"}), root / "cut", mesh="dp_shard=2")
    api.gather(root / "cut", root / "wide")
    return root / "wide"


def fp8(root: Path) -> Path:
    api.gather(wide(root), root / "fp8", quantize="fp8")
    return root / "fp8"


SOURCES = {each.__name__: each for each in (hf, dcp, items, zipped, views, ranks, wide, fp8)}


def average(source: Path, out: Path, *, first: bool = True, **options: object) -> Conversion:
    paths = [source, source.with_name("twin" + source.suffix)]
    return api.average(paths if first else paths[::-1], out, **options)


def parts(source: Path, out: Path, **options: object) -> Conversion:
    verb = api.shard if source.suffix == ".pt" or source.name in ("hf", "fp8") else api.reshard
    return [verb(source, out, mesh="dp_shard=3", part=f"{i}/3", **options) for i in (1, 0, 2)][-1]


def rename(source: Path, out: Path, **options: object) -> Conversion:
    keymap = source.parent / "map.txt"
    keymap.write_text("\n".join(("[*]", *(f"{name} = {name.replace('down_proj', 'down')}" for name in state()))))
    return api.rename(source, out, map=keymap, **options)


def merge(source: Path, out: Path, **options: object) -> Conversion:
    return api.merge_lora(source, adapter(source.parent / "lora"), out, **options)


def adapter(directory: Path) -> Path:
    name = "base_model.model." + TAKEN.removesuffix("weight")
    factors = {f"{name}lora_A.weight": torch.ones(4, 26), f"{name}lora_B.weight": torch.ones(21, 4)}
    directory.mkdir(exist_ok=True)
    save_file(factors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


CASTS = [{}, {"dtype": "f32"}, {"dtype": "f16"}]
DOWN = {"include": ["**down_proj**"]}
COMMANDS: list[tuple[Callable[..., Conversion], dict[str, object]]] = [
    *((api.gather, cast) for cast in CASTS),
    *((api.gather, {"to": "torch", **cast}) for cast in CASTS[:2]),
    *((api.gather, {**DOWN, **cast}) for cast in CASTS[:2]),
    *((api.gather, {"dequantize": True, **cast}) for cast in CASTS[:2]),
    (api.gather, {"quantize": "fp8"}),
    (api.gather, {"max_shard_size": "700", "dtype": "f32", "num_workers": 3}),
    *((api.shard, {"mesh": "dp_shard=2", **cast}) for cast in CASTS),
    (api.shard, {"mesh": "dp_shard=2", "dequantize": True}),
    *((api.reshard, {"mesh": "dp_shard=5", **cast}) for cast in CASTS[:2]),
    *((parts, cast) for cast in CASTS[:2]),
    *((command, cast) for command in (average, rename, merge) for cast in CASTS[:2]),
    *((average, {"first": False, **cast}) for cast in CASTS[:2]),
    *((api.extract, {**DOWN, **cast}) for cast in CASTS[:2]),
]


def fits(source: str, command: Callable[..., Conversion], options: dict[str, object]) -> bool:
    """Does a command take this source? Quantised weights have but a few."""
    is_sharded = source in ("dcp", "items", "ranks")
    if "quantize" in options or source == "wide":
        return ("quantize" in options) == (source == "wide")
    if "dequantize" in options or (source == "fp8" and command not in (api.gather, parts)):
        return "dequantize" in options and source == "fp8"
    return command is not (api.shard if is_sharded else api.reshard)


ROWS = [
    pytest.param(source, command, options, id="-".join((source, command.__name__, *map(str, options.values()))))
    for source in SOURCES
    for command, options in COMMANDS
    if fits(source, command, options)
]


def flip(source: Path, fqn: str) -> None:
    """Flip an exponent's bit in the middle of a tensor."""
    with open_path(str(source)) as opened:
        entry = next(entry for entry in opened.checkpoint.tensors if entry.fqn == fqn)
        span = opened.resolve(entry).chunks[0].span
    damage.flip(source / span.file if source.is_dir() else source, span.offset + span.nbytes // 4 * 2 + 1, 0x20)


def outcome(command: Callable[..., Conversion], source: Path, out: Path, **options: object) -> Conversion | None:
    """Return what a run came to; None when it refused, and left nothing."""
    try:
        return command(source, out, **options)
    except UnreadableError:
        assert not out.exists()
        return None


def named(done: Conversion, why: str = "") -> list[str]:
    return [text for text in done.not_checked if "unchecked, because " + why in text]


@pytest.mark.full(but=["hf-gather-f32", "hf-parts-f32", "hf-average-False-f32", "fp8-gather-True", "views-gather"])
@pytest.mark.parametrize(("name", "command", "options"), ROWS)
def test_a_flipped_bit_is_refused_or_named(name, command, options, tmp_path: Path) -> None:
    with small_blocks(BLOCK_BYTES):
        source = SOURCES[name](tmp_path)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, source.with_name("twin" + source.suffix))
        healthy = command(source, tmp_path / "healthy", **options)
        assert healthy.verified == (named(healthy) == named(healthy, "their tensors are left out")) == (name != "views")
        for fqn in (TAKEN, LEFT):
            damaged = tmp_path / fqn / source.name
            damaged.parent.mkdir()
            copy(source, damaged)
            copy(source, damaged.with_name("twin" + source.suffix))
            flip(damaged, fqn)
            done = outcome(command, damaged, tmp_path / f"out-{fqn}", **options)
            if done is not None and "include" in options and fqn == LEFT:
                assert named(done) or command is api.extract  # which opens a part, and no more
            elif done is not None:
                assert name in ("views", "ranks"), "a manifest or a CRC-32 of it is there"
                assert named(done)
                assert not done.verified


def test_an_adapter_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    options = {"mesh": "dp_shard=2", "serialization": "safetensors"}  # a manifest, and no CRC-32
    api.shard(adapter(tmp_path / "lora"), tmp_path / "recorded", **options)
    done = api.export_lora(tmp_path / "recorded", tmp_path / "healthy", dtype="bf16")
    assert (done.conversion.verified, done.conversion.checked["digests"]) == (True, 2)
    flip(tmp_path / "recorded", next(iter(load_file(tmp_path / "lora/adapter_model.safetensors"))))
    for command in (api.export_lora, partial(api.merge_lora, hf(tmp_path))):
        with pytest.raises(UnreadableError, match="not what the manifest recorded"):
            command(tmp_path / "recorded", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@given(
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    block_bytes=st.integers(4, 60),
    bits=st.sampled_from([8, 16, 32, 64]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(200))
def test_digest_as_stored_is_that_of_one_pass(shape, block_bytes, bits, order) -> None:
    span = ByteSpan(file="f", offset=0, nbytes=4 * math.prod(shape))
    chunk = Chunk(box=Box((0,) * len(shape), shape), span=span)
    entry = TensorEntry(fqn="w", dtype=BY_NAME["F32"], shape=shape, chunks=(chunk,))
    source = VirtualSource(LocalSource("."), {"f": VirtualFile.of(bytes(range(1, 250)) * 12)})
    with small_blocks(block_bytes):
        wanted = scan([entry], source, num_workers=1).digests["w"]
        blocks = list(split_blocks(shape, bits, block_bytes=block_bytes))
        order.shuffle(blocks)
        stored = AsStored(entry, chunk_index(entry), source)
        for block in blocks:
            stored.add(block, read_block(entry, chunk_index(entry), entry.dtype, block, source, Buffers())[0])
        assert stored.digest() == wanted
