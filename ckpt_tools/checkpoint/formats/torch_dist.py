"""Steps of Megatron-core in its torch_dist format, also as NeMo 2 and Megatron-Bridge keep them.

A step is a DCP checkpoint (`formats.dcp`) beside a metadata.json that names the backend. Its tensors are whole: what a
rank holds of gate and up, or of a group of queries, is saved at its place in the whole tensor. Layers that are alike
may be one tensor with a first dim of layers (`names/megatron.txt`). NeMo 2 has the step in `weights/`.

Source: megatron-core `dist_checkpointing/{core,serialization,mapping}.py`, `dist_checkpointing/strategies/torch.py`,
`optimizer/distrib_optimizer.py` (0.15.3, 0.16.1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats._torch_file import read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import settings_of
from ckpt_tools.checkpoint.formats.dcp import FORMAT as PLAIN, Dcp
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.format import Format, Opened, read_document
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source

CONFIG_NAME = "metadata.json"  # What makes a DCP directory a step of Megatron's
_COMMON_NAME = "common.pt"  # State that is not sharded: `args` of the command line, the iteration, the groups
_COMMON_BLOB = "common_state/"  # Where newer ones keep it, inside of the DCP checkpoint
_NEMO = "weights/"
_BACKEND = ("torch_dist", 1)
_MAX_CONFIG_BYTES = 1 << 16
_BUCKETS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.")


class TorchDist(Dcp):
    """What `megatron.core.dist_checkpointing.save` writes."""

    name = "torch-dist"
    found_by = "`.metadata` and a `metadata.json` that names the backend; also in `weights/`"
    about = "a step of Megatron-core, Megatron-Bridge or NeMo 2: [Megatron](../dev/formats.md#megatron)"
    whole_by = "`.metadata`, which names every file and chunk"
    written_by = ""
    keeps_order = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the file that names the backend."""
        return any({at + METADATA_NAME, at + CONFIG_NAME} <= files.keys() for at in ("", _NEMO))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read `.metadata`; a metadata.json of somebody else's leaves it a plain DCP checkpoint."""
        if METADATA_NAME not in files and _NEMO + METADATA_NAME in files:
            opened = open_path(os.path.join(path, _NEMO), as_part=True)
            source.close()
            return replace(opened, notes=(f"reads {_NEMO} of NeMo's step, and nothing beside it", *opened.notes))
        backend = _backend(source) if CONFIG_NAME in files else _BACKEND  # without, somebody said --from
        if backend is None:
            return PLAIN.open(source, files, path=path, manifest=manifest)
        if backend != _BACKEND:
            what = f"a Megatron step with backend {backend[0]}, version {backend[1]}, which ckpt does not know"
            hint = "read it as a torch.distributed.checkpoint directory: --from dcp"
            raise UnreadableError(what, where=os.path.join(path, CONFIG_NAME), hint=hint)
        opened = super().open(source, files, path=path, manifest=manifest)
        notes = (*opened.notes, *_notes(opened))
        if any(blob.fqn.startswith(_COMMON_BLOB) for blob in opened.checkpoint.blobs):
            return replace(opened, notes=notes)
        try:
            return replace(opened, notes=notes, settings=_settings(source, files))
        except UnreadableError as error:  # the weights do not need it
            what = f"Megatron does not resume without it: {error.what}"
            return replace(opened, notes=notes, missing=((_COMMON_NAME, what),))


FORMAT: Format = TorchDist()


def _backend(source: Source) -> tuple[object, object] | None:
    """Return name and version of the backend; None where the file is not Megatron's."""
    config = parse_json(read_document(source, CONFIG_NAME, _MAX_CONFIG_BYTES), what="the file", where=CONFIG_NAME)
    if not isinstance(config, dict) or "sharded_backend" not in config:
        return None
    return config["sharded_backend"], config.get("sharded_backend_version")


def _settings(source: Source, files: Mapping[str, int]) -> dict[str, object]:
    """Return the plain values of Megatron-LM's command line; its pickle is not run."""
    if _COMMON_NAME not in files:
        raise UnreadableError("no such file")
    common = read_torch_file(source, _COMMON_NAME).value
    return settings_of(common)


def _notes(opened: Opened) -> tuple[str, ...]:
    buckets = sum(_BUCKETS.match(entry.fqn) is not None for entry in opened.checkpoint.tensors)
    if not buckets:
        return ()
    return (f"{buckets} tensors of optimizer state are Megatron's buckets, which do not separate parameters",)
