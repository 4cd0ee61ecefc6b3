"""Which single bit of a `.metadata` can flip unnoticed, and what does it change? All of them are tried.

    PYTHONPATH=tests .venv/bin/python -m corrupt.every_bit     writes the table into docs/dev/detection.md

Stock PyTorch wrote the checkpoints. A flip that passes `verify --level structure` without an error is compared with the
intact file twice: as ckpt reads it (names, paths, dtypes, shapes, boxes, files, offsets, lengths), and as stock torch
unpickles it. The first must never differ; what differs in the second is counted by field.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from corrupt.every_byte import DOCUMENT
from fsdp2.ranks import run_ranks
from samples import memory_directory, without_ranks

from ckpt_tools.checkpoint.formats.dcp_metadata import ParsedMetadata, parse_metadata
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checks.verify import Verification, verify
from ckpt_tools.errors import UnreadableError

NAMES = "names that nothing repeats"
"""The one thing that can change unnoticed; `verify` says so in `not_checked`."""
_MARKS = ("<!-- every bit: written by tests/corrupt/every_bit.py -->", "<!-- every bit: end -->")


def flat(directory: Path) -> None:
    """A model's state dict, as a script with one process saves it: every path is its name, and stored once with it."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {
        "model.0.weight": torch.arange(8.0).reshape(4, 2),
        "model.1.weight": torch.ones(4, 2),
        "model.1.bias": torch.zeros(4, dtype=torch.bfloat16),
        "model.scale": torch.tensor(1.5),
    }
    with without_ranks():
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def nested(directory: Path) -> None:
    """Model, optimizer and more, as a trainer with one process nests them."""
    import torch
    import torch.distributed.checkpoint as dcp

    weight = torch.arange(8.0).reshape(4, 2)
    moments = {"step": torch.tensor(3.0), "exp_avg": weight + 1, "exp_avg_sq": weight * 2}
    state = {
        "model": {"0.weight": weight, "1.weight": weight.t(), "1.bias": torch.zeros(4, dtype=torch.bfloat16)},
        "optim": {"state": {"0.weight": moments}, "param_groups": [{"lr": 0.1, "params": ["0.weight"]}]},
        "step": 5,
    }
    with without_ranks():
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def two_ranks(directory: Path) -> None:
    """The same of a model that two ranks share, rows to each."""
    run_ranks(2, _save_as_rank, str(directory))


def _save_as_rank(rank: int, world_size: int, directory: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    weight = torch.arange(16.0).reshape(8, 2)
    state = {
        "model": {"0.weight": cut(weight), "1.weight": cut(weight * 3), "1.bias": cut(torch.ones(3))},
        "optim": {
            "state": {"0.weight": {"step": torch.tensor(3.0), "exp_avg": cut(weight + 1)}},
            "param_groups": [{"lr": 0.1}],
        },
    }
    dcp.save(state, checkpoint_id=directory)


def by_ckpt(directory: Path) -> None:
    """What `reshard` writes for two ranks, its manifest removed."""
    from ckpt_tools import api

    flat(directory.with_name("source"))
    api.reshard(directory.with_name("source"), directory, mesh="dp_shard=2", num_workers=1)
    (directory / "ckpt_manifest.json").unlink()
    shutil.rmtree(directory.with_name("source"))


RECIPES: dict[str, Callable[[Path], None]] = {
    "flat": flat,
    "nested": nested,
    "two ranks": two_ranks,
    "by ckpt": by_ckpt,
}


# What a flip changes


def _as_torch_reads(metadata: bytes) -> dict[str, object]:
    """Field → what stock torch reads there. Only for bytes that the inert reader took."""
    read = pickle.loads(metadata)
    stored = read.state_dict_metadata
    tensors = {fqn: entry for fqn, entry in stored.items() if hasattr(entry, "chunks")}
    found: dict[str, object] = {
        "names": list(stored),
        "shapes and chunks": {fqn: (entry.size, entry.chunks) for fqn, entry in tensors.items()},
        "places": {(i.fqn, i.offset): (s.relative_path, s.offset, s.length) for i, s in read.storage_data.items()},
        "transforms": [getattr(s, "transform_descriptors", None) for s in read.storage_data.values()],
        "index hints": {(i.fqn, i.offset): i.index for i in read.storage_data},
        "planner_data": getattr(read, "planner_data", None),
        "storage_meta": sorted(map(repr, getattr(getattr(read, "storage_meta", None), "__dict__", {}).items())),
        "version": getattr(read, "version", None),
        "other attributes": sorted(vars(read).keys() - {field.name for field in fields(read)}),
    }
    for name in ("dtype", "requires_grad", "layout", "pin_memory", "memory_format"):
        found[name] = {fqn: str(getattr(entry.properties, name)) for fqn, entry in tensors.items()}
    return found


def flips(intact: bytes, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """Every `step`-th bit, and the file with it flipped."""
    for bit in range(0, 8 * len(intact), step):
        raw = bytearray(intact)
        raw[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(raw)


def _verify(path: Path) -> Verification | None:
    """Return what `verify` says; None when it cannot even open the checkpoint."""
    try:
        with open_path(str(path)) as opened:
            return verify(opened, level="structure", num_workers=1)
    except UnreadableError:
        return None


def sweep(path: Path, step: int = 1) -> tuple[Counter[str], list[str]]:
    """Flip bits of the `.metadata` in `path`.

    Returns:
        Outcome → count ("tried", "found", and by field what passed), and what must not be: in words, one each.
    """
    file = path / ".metadata"
    intact = file.read_bytes()
    expected = parse_metadata(intact)
    as_torch = _as_torch_reads(intact)
    tally: Counter[str] = Counter()
    misses: list[str] = []
    for bit, raw in flips(intact, step):
        tally["tried"] += 1
        file.write_bytes(raw)
        result = _verify(path)
        if result is None or not result.ok:
            tally["found"] += 1
            continue
        parsed = parse_metadata(raw)
        changed = _changed(expected, parsed)
        if changed == "names" and any("that .metadata stores only once" in text for text in result.not_checked):
            tally[NAMES] += 1
        elif changed:
            misses.append(f"bit {bit}: {changed}")
        else:
            try:
                read = _as_torch_reads(raw)
            except Exception as error:  # torch's own unpickling may refuse what matters to nobody else
                tally[f"stock torch refuses it ({type(error).__name__})"] += 1
                continue
            tally.update(name for name in as_torch if read[name] != as_torch[name])
            tally["nothing at all"] += read == as_torch
    file.write_bytes(intact)
    return tally, misses


def _changed(one: ParsedMetadata, other: ParsedMetadata) -> str:
    """Say what ckpt reads differently: "" for nothing, "names", or all that it is."""
    if one == other:
        return ""
    left, right = (_without_names(parsed) for parsed in (one, other))
    if left == right:
        return "names"
    pairs = zip((*one.tensors, *one.blobs), (*other.tensors, *other.blobs), strict=False)
    return next((f"{x} became {y}" for x, y in pairs if x != y), "more or fewer entries")


def _without_names(parsed: ParsedMetadata) -> object:
    tensors = [(entry.dtype, entry.shape, entry.chunks, len(entry.path)) for entry in parsed.tensors]
    return tensors, [(blob.span, len(blob.path)) for blob in parsed.blobs]


# The document


def to_table(tallies: dict[str, Counter[str]]) -> str:
    """Return the Markdown table of all sweeps."""
    rows = sorted({name for tally in tallies.values() for name in tally} - {"tried", "found"})
    lines = [f"| | {' | '.join(tallies)} |", "|---" * (1 + len(tallies)) + "|"]
    for name in ("tried", "found", *rows):
        lines.append(f"| {name} | {' | '.join(str(tally[name]) for tally in tallies.values())} |")
    return "\n".join(lines)


def documented() -> set[str]:
    """Return the outcomes that the document's table names."""
    table = DOCUMENT.read_text(encoding="utf-8").partition(_MARKS[0])[2].partition(_MARKS[1])[0]
    return {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")}


def main() -> int:
    """Sweep all recipes, write the table, and print what must not be."""
    tallies, misses = {}, []
    for name, recipe in RECIPES.items():
        with memory_directory() as root:
            path = Path(root) / "run"
            recipe(path)
            tallies[name], missed = sweep(path)
            size = os.path.getsize(path / ".metadata")
        print(f"{name}: {size} bytes: {dict(tallies[name])}, {len(missed)} missed", flush=True)
        misses += missed
    for text in misses[:200]:
        print(text)
    begin, end = _MARKS
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    if rest:
        table = to_table(tallies)
        DOCUMENT.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
