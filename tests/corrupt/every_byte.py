"""Which byte of a checkpoint does which check find? Recipes, the map of every file, and the tables of the document.

    PYTHONPATH=tests .venv/bin/python -m corrupt.every_byte     writes the tables into docs/dev/detection.md

Every byte is damaged once, one bit of it, another bit for each. `data` begins with all that `structure` does, and
`--against` with all that `data` does, so a flip that a weaker check has found is not tried on the stronger one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from samples import memory_directory, safetensors_bytes, tensor, without_ranks, write_model

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.dcp_metadata import parse_metadata
from ckpt_tools.errors import CkptError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "dev" / "detection.md"
LEVELS = ("structure", "data", "against")
Tally = dict[str, list[int]]
"""Region → flips tried, then flips found by each of `LEVELS`."""

_TENSORS = {"w": tensor("F32", 3, 2, seed=1), "s": tensor("BF16", 4, seed=2)}
_CONFIG = b'{"model_type": "none"}\n'


# Recipes


def stock(directory: Path) -> Path:
    """What `dcp.save` writes: a tensor, an object, and a config beside them."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.arange(6.0).reshape(3, 2), "run": {"name": "first"}}
    with without_ranks():
        dcp.save(state, checkpoint_id=directory / "stock", no_dist=True)
    (directory / "stock" / "config.json").write_bytes(_CONFIG)
    return directory / "stock"


def dcp_with_manifest(directory: Path) -> Path:
    """What `reshard` writes for two ranks."""
    api.reshard(stock(directory), directory / "run", mesh="dp_shard=2", num_workers=1)
    return directory / "run"


def dcp_without_manifest(directory: Path) -> Path:
    """The same, its manifest removed."""
    run = dcp_with_manifest(directory)
    (run / "ckpt_manifest.json").unlink()
    return run


def hf_with_manifest(directory: Path) -> Path:
    """What `gather` writes: two files and an index."""
    source = write_model(directory / "model", _TENSORS, num_files=2, assets={"config.json": _CONFIG})
    api.shard(source, directory / "run", mesh="dp_shard=2", num_workers=1)
    api.gather(directory / "run", directory / "hf", num_workers=1)
    return directory / "hf"


def hf_without_manifest(directory: Path) -> Path:
    """The same as anybody else writes it."""
    path = hf_with_manifest(directory)
    (path / "ckpt_manifest.json").unlink()
    return path


def hf_sharded(directory: Path) -> Path:
    """What DCP's own HF writer writes for two ranks."""
    path = directory / "sharded"
    path.mkdir()
    for rank, (rows, start) in enumerate([((2, 2), 0), ((1, 2), 2)]):
        part = {"w": tensor("F32", *rows, seed=rank)}
        info = json.dumps({"w": {"saved_offsets": [start, 0]}})
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        (path / name).write_bytes(safetensors_bytes(part, metadata={"DCP_SHARDING_INFO": info}))
    (path / "config.json").write_bytes(_CONFIG)
    return path


def hf_sharded_with_manifest(directory: Path) -> Path:
    """The same as `shard` writes it."""
    source = write_model(directory / "model", _TENSORS, assets={"config.json": _CONFIG})
    api.shard(source, directory / "run", mesh="dp_shard=2", serialization="safetensors", num_workers=1)
    return directory / "run"


LAYOUTS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "dcp-manifest": ("DCP written by ckpt", dcp_with_manifest),
    "dcp-bare": ("DCP written by ckpt, without its manifest", dcp_without_manifest),
    "dcp-stock": ("DCP written by `dcp.save`", stock),
    "hf-manifest": ("HF directory written by ckpt", hf_with_manifest),
    "hf-bare": ("HF directory without a manifest", hf_without_manifest),
    "hf-sharded-manifest": ("HF-sharded written by ckpt", hf_sharded_with_manifest),
    "hf-sharded": ("HF-sharded, by DCP's `HuggingFaceStorageWriter`", hf_sharded),
}


# The map of a file


def map_file(path: Path, name: str) -> list[str]:
    """Return the region of every byte of a file."""
    raw = (path / name).read_bytes()
    if name.endswith(".safetensors"):
        start = 8 + int.from_bytes(raw[:8], "little")
        return (
            ["safetensors: length of the header"] * 8
            + ["safetensors: header"] * (start - 8)
            + ["tensor bytes"] * (len(raw) - start)
        )
    if not name.endswith(".distcp"):
        return [{"ckpt_manifest.json": "manifest", "config.json": "config and other assets"}.get(name, name)] * len(raw)
    regions = ["padding between items"] * len(raw)
    parsed = parse_metadata((path / ".metadata").read_bytes())
    spans = [(chunk.span, "tensor") for entry in parsed.tensors for chunk in entry.chunks]
    for span, kind in [*spans, *((blob.span, "object") for blob in parsed.blobs)]:
        if span.file == name:
            item = raw[span.offset : span.offset + span.nbytes]
            regions[span.offset : span.offset + span.nbytes] = _map_item(item, kind)
    return regions


def _map_item(item: bytes, kind: str) -> list[str]:
    places, idle = f"{kind} item: names, sizes, offsets, CRC-32s", f"{kind} item: dates, versions, attributes"
    # What no header and no record claims is what torch puts between them: padding, and sizes once more.
    regions = [f"{kind} item: padding and data descriptors"] * len(item)

    def mark(start: int, *fields: tuple[int, str]) -> int:
        for nbytes, region in fields:
            regions[start : start + nbytes] = [region] * nbytes
            start += nbytes
        return start

    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        position = archive.start_dir
        for info in archive.infolist():
            name = len(info.filename)
            extra = int.from_bytes(item[info.header_offset + 28 : info.header_offset + 30], "little")
            at = mark(info.header_offset, (4, places), (2, idle), (4, places), (4, idle), (16 + name, places))
            mark(at + extra, (info.file_size, _record(info.filename, kind)))
            position = mark(
                position, (4, places), (4, idle), (4, places), (4, idle), (18, places), (8, idle), (4 + name, places)
            )
            position += len(info.extra)
        mark(position, (len(item) - position, places))
    return regions


def _record(name: str, kind: str) -> str:
    if kind == "object":
        return "object item: what it holds"
    if re.search(r"/data/\d+$", name):
        return "tensor bytes"
    is_read = name.endswith(("/data.pkl", "/byteorder", "/version"))
    return "tensor item: data.pkl, byteorder, version" if is_read else "tensor item: records that nobody reads"


# The sweep


def sweep(path: Path, passed: Callable[[str, bytes, bytes], None] | None = None, *, step: int = 1) -> Tally:
    """Flip one bit of every `step`th byte of every file below `path`, and count what is found.

    `passed` gets the name, the intact and the damaged content of a file of which no check finds the damage.
    """
    reference = path.with_name(path.name + "-intact")
    shutil.copytree(path, reference)
    tally: Tally = {}
    for name in sorted(entry.name for entry in path.iterdir()):
        regions = map_file(path, name)
        with (path / name).open("r+b", buffering=0) as file:
            for offset, region in [*enumerate(regions)][::step]:
                intact = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([intact[0] ^ 1 << offset % 8]), offset)
                row = tally.setdefault(region, [0, *(0 for _ in LEVELS)])
                row[0] += 1
                first = next((i for i, level in enumerate(LEVELS) if _finds(path, level, reference)), len(LEVELS))
                if first == len(LEVELS) and passed is not None:
                    damaged = (path / name).read_bytes()
                    passed(name, damaged[:offset] + intact + damaged[offset + 1 :], damaged)
                for i in range(first, len(LEVELS)):
                    row[1 + i] += 1
                os.pwrite(file.fileno(), intact, offset)
    shutil.rmtree(reference)
    return tally


def _finds(path: Path, level: str, reference: Path) -> bool:
    try:
        if level == "structure":
            return bool(api.verify(path, level="structure", num_workers=1).findings)
        against = reference if level == "against" else None
        return bool(api.verify(path, level="data", against=against, num_workers=1).findings)
    except CkptError as error:
        if error.exit_code != 4:
            raise
        return True


# The document


def to_table(tally: Tally) -> str:
    """Return the Markdown table of a sweep."""
    rows = ["| damaged byte | structure | data | `--against` |", "|---|---|---|---|"]
    for region, (total, *found) in sorted(tally.items()):
        cells = ["every flip" if n == total else "–" if n == 0 else "some" for n in found]
        shown = f"`{region}`" if region.startswith((".", "model")) else region
        rows.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(rows)


def documented(layout: str) -> str:
    """Return the table that the document has for a layout."""
    begin, end = _marks(layout)
    return DOCUMENT.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


def _marks(layout: str) -> tuple[str, str]:
    return f"<!-- {layout}: written by tests/corrupt/every_byte.py -->", f"<!-- {layout}: end -->"


@contextlib.contextmanager
def made(layout: str) -> Iterator[Path]:
    """Make the checkpoint of a layout, in memory where possible."""
    with memory_directory() as root:
        directory = Path(root) / "work"
        directory.mkdir()
        yield LAYOUTS[layout][1](directory)


def main() -> None:
    """Write the tables into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    flips = 0
    for layout in LAYOUTS:
        with made(layout) as path:
            tally = sweep(path)
        print(layout, tally)
        flips += sum(row[0] for row in tally.values())
        begin, end = _marks(layout)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{to_table(tally)}\n{end}{rest.partition(end)[2]}"
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"{flips} bytes flipped, one by one")


if __name__ == "__main__":
    main()
