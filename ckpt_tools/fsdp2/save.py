"""Save a sharded model and its optimizer: all ranks write, one publishes, and nobody believes in half a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools._version import __version__
from ckpt_tools.checks.verify import verify
from ckpt_tools.conversions.job import check_replaceable
from ckpt_tools.description.layout import Mesh
from ckpt_tools.description.transform import strip_wrappers
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.file_names import METADATA_NAME
from ckpt_tools.formats.frames import digest_frames
from ckpt_tools.formats.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, build_manifest
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.fsdp2.agree import from_rank0, gather, this_rank, together, world_size
from ckpt_tools.fsdp2.local import placements_of
from ckpt_tools.fsdp2.mesh import mesh_of
from ckpt_tools.fsdp2.wrap import plan_of
from ckpt_tools.moving.execute import scan
from ckpt_tools.moving.plan import blob_name, copy_span
from ckpt_tools.storage.staging import Staging
from ckpt_tools.text import first_few

MODEL_KEY = "model"
"""Under which the model lies in the checkpoint."""
OPTIMIZER_KEY = "optimizer"
"""Under which the optimizer lies."""


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    trainable_only: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save model and optimizer as a DCP checkpoint that stock PyTorch loads, with ckpt's manifest.

    Collective. Every rank writes its own parts into a staging directory beside `path`; all ranks read part of it
    back for the digests; rank 0 checks the structure and publishes. When anything fails on any rank, all ranks
    raise and `path` is as it was. Keys: `model.<fqn>`, `optimizer.state.<fqn>.<name>`, `optimizer.param_groups.…`.

    Args:
        model: Sharded (or plain, in one process).
        optimizer: Its state is saved too; without a state it is initialised first, as PyTorch does.
        path: A directory that all ranks see.
        overwrite: Replace an existing checkpoint once the new one is durable.
        trainable_only: Leave frozen parameters out (adapters).
        extra: More tensors for the model's part, by name: equal on all ranks, or DTensors.

    Raises:
        DestinationExistsError: `path` exists.
        CkptError: Anything else that went wrong on another rank; what goes wrong on this one is raised as it is.
    """
    destination = os.fspath(path)
    staging: Staging | None = None

    def begin() -> str:
        nonlocal staging
        if overwrite:
            check_replaceable(destination)
        staging = Staging(destination, overwrite=overwrite)
        staging.begin()
        return staging.directory

    try:
        directory = from_rank0(begin)
        state = together(lambda: _state_of(model, optimizer, trainable_only=trainable_only, extra=extra))
        together(lambda: _write(state, directory))
        parts = gather(together(lambda: _digests(directory)))
        digests = {name: digest for part in parts for name, digest in part.items()}
        together(lambda: None if staging is None else _publish(staging, state, digests, _mesh(model, state)))
    finally:
        if staging is not None:
            staging.discard()


State = dict[str, Any]
"""Nested state dict: "model" → name → tensor, "optimizer" → "state" and "param_groups"."""


def _state_of(
    model: nn.Module, optimizer: Optimizer | None, *, trainable_only: bool, extra: Mapping[str, torch.Tensor] | None
) -> State:
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if meta:
        raise UsageError(
            f"{len(meta)} tensors of the model have no values: {first_few(meta, 4)}",
            where="save_checkpoint",
            hint="load a checkpoint first",
        )
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    state: State = {MODEL_KEY: get_model_state_dict(model, options=options)}
    if trainable_only:  # what 4-bit layers add to a state dict belongs to their frozen weights
        beside = tuple(f"{strip_wrappers(name)}." for name, p in model.named_parameters() if not p.requires_grad)
        state[MODEL_KEY] = {name: t for name, t in state[MODEL_KEY].items() if not name.startswith(beside)}
    clash = sorted(set(extra or ()) & set(state[MODEL_KEY]))
    if clash:
        raise UsageError(f"the model has tensors of its own named {first_few(clash, 4)}", where="extra")
    state[MODEL_KEY] |= extra or {}
    if optimizer is not None:
        state[OPTIMIZER_KEY] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def _write(state: State, directory: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as it should be
        save(
            state,
            storage_writer=_Writer(directory),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            no_dist=world_size() == 1,
        )


class _Writer(FileSystemWriter):
    """The stock writer, without the path of this machine in `.metadata`."""

    def storage_meta(self) -> StorageMeta | None:
        """Return no identity of the checkpoint but the save's own."""
        return StorageMeta(save_id=self.save_id)


def _digests(directory: str) -> dict[str, str]:
    """Read this rank's share of what was written; return the digests, CRC-32s are held against the writers'."""
    with open_path(directory, format="dcp") as written:
        blobs = [copy_span(blob_name(blob), blob.span, 0).source for blob in written.checkpoint.blobs]
        # Tensors and blobs (as bytes), large ones spread over the ranks.
        entries = sorted((*written.checkpoint.tensors, *blobs), key=lambda entry: -entry.nbytes)
        own = entries[this_rank() :: world_size()]
        resolved = [entry if entry.fqn.startswith("\0") else written.resolve(entry) for entry in own]
        return scan(resolved, written.source, num_workers=1).digests


def _publish(staging: Staging, state: State, digests: Mapping[str, str], mesh: Mesh | None) -> None:
    files = staging.adopt()
    with open_path(staging.directory, format="dcp") as written:
        metadata = written.source.read(METADATA_NAME, 0, written.source.size(METADATA_NAME))
        checked = verify(written, level="structure", num_workers=1)
        if not checked.ok:
            finding = checked.errors[0]
            raise CkptError(
                f"the written checkpoint fails its check: {finding.what}",
                where=finding.where,
                hint="nothing was published",
            )
        manifest = _manifest(written, files, state, digests, metadata, mesh)
    staging.take(METADATA_NAME)
    staging.write_document(MANIFEST_NAME, build_manifest(manifest))
    staging.write_document(METADATA_NAME, metadata)  # the commit marker, last
    staging.publish()


def _manifest(
    written: Opened,
    files: Mapping[str, int],
    state: State,
    digests: Mapping[str, str],
    metadata: bytes,
    mesh: Mesh | None,
) -> Manifest:
    resolved = written.resolved()
    payloads = (chunk.span for entry in resolved.tensors for chunk in entry.chunks)
    blobs = written.checkpoint.blobs
    return Manifest(
        writer=f"ckpt {__version__}",
        format="dcp",
        mesh=mesh,
        tensors={
            entry.fqn: TensorRecord(
                dtype=entry.dtype,
                shape=entry.shape,
                digest=digests[entry.fqn],
                placements={} if mesh is None else placements_of(reduce(getitem, entry.path, cast("Any", state))),
            )
            for entry in resolved.tensors
        },
        blobs={blob.fqn: FileRecord(nbytes=blob.span.nbytes, digest=digests[blob_name(blob)]) for blob in blobs},
        documents={METADATA_NAME: FileRecord(nbytes=len(metadata), digest=digest_bytes(metadata))},
        files=files,
        frames=digest_frames(files, payloads, blobs, written.source),
        source={"format": "model in memory"},
    )


def _mesh(model: nn.Module, state: State) -> Mesh | None:
    """Return the mesh that the manifest records; None when its axes have other names than ours."""
    plan = plan_of(model)
    if plan is not None:
        return mesh_of(plan.mesh)
    meshes: list[DeviceMesh] = [t.device_mesh for t in state[MODEL_KEY].values() if isinstance(t, DTensor)]
    widest = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    return None if widest is None or widest.size() != world_size() else mesh_of(widest)
