"""Save a sharded model and its optimizer: all ranks write, one publishes, and nobody believes in half a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
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
from ckpt_tools.fsdp2.agree import current_group, from_rank0, gather, talking_over, this_rank, together, world_size
from ckpt_tools.fsdp2.internals import mesh_axes
from ckpt_tools.fsdp2.local import placements_of
from ckpt_tools.fsdp2.mesh import mesh_of
from ckpt_tools.fsdp2.state import MODEL_KEY, OPTIMIZER_KEY, check_names, collect, fqn_of, leaves, model_of, models_of
from ckpt_tools.fsdp2.wrap import plan_of
from ckpt_tools.moving.execute import scan
from ckpt_tools.moving.plan import blob_name, copy_span
from ckpt_tools.storage.staging import Staging
from ckpt_tools.text import first_few

State = dict[str, Any]
"""Nested state dict: "model" → name → tensor, "optimizer" → "state" and "param_groups", name → train state."""


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, object] | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save model, optimizer and train state as a DCP checkpoint that stock PyTorch loads, with ckpt's manifest.

    Collective. Every rank writes its own parts into a staging directory beside `path`; all ranks read part of it
    back for the digests; rank 0 checks the structure and publishes. When anything fails on any rank, all ranks
    raise and `path` is as it was. Keys: `model.<fqn>`, `optimizer.state.<fqn>.<name>`, `optimizer.param_groups.…`,
    and `<name>.…` for every name of `state`. Waits for an `async_save_checkpoint` that is under way.

    Args:
        model: Sharded (or plain, in one process).
        optimizer: Its state is saved too; without a state it is initialised first, as PyTorch does.
        path: A directory that all ranks see.
        state: What else to save, by name: modules, optimizers of these, objects with `state_dict` and
            `load_state_dict`, tensors, numbers, texts, None, and dicts and lists of values. Equal on all ranks,
            except for DTensors and what is in `PerRank` or is an `RngState`.
        overwrite: Replace an existing checkpoint once the new one is durable.
        trainable_only: Leave frozen parameters of `model` out (adapters).
        extra: More tensors for the model's part, by name: equal on all ranks, or DTensors.

    Raises:
        DestinationExistsError: `path` exists.
        UsageError: Train state that could not be read back, or that differs between ranks.
        CkptError: Anything else that went wrong on another rank; what goes wrong on this one is raised as it is.
    """
    _prepare(model, optimizer, path, state or {}, overwrite, trainable_only, extra).finish()


_last: Future[None] | None = None
"""The save that runs in the background, or the last one that did."""


def async_save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, object] | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Future[None]:
    """Do as `save_checkpoint`, in the background: return once everything is copied to host memory.

    Collective. Training may go on at once. The next save waits for this one. Before the process group is destroyed,
    and before anything relies on the checkpoint, call `result()` of what is returned, which raises what went wrong.

    Args:
        model: As for `save_checkpoint`, and so are the others.
        optimizer: Its state is saved too.
        path: A directory that all ranks see.
        state: What else to save, by name.
        overwrite: Replace an existing checkpoint once the new one is durable.
        trainable_only: Leave frozen parameters of `model` out.
        extra: More tensors for the model's part.

    Returns:
        Done when the checkpoint is published, on every rank.

    Raises:
        DestinationExistsError: `path` exists.
        UsageError: As `save_checkpoint`.
    """
    global _last  # noqa: PLW0603 - one save at a time in a process
    group = _own_group()
    save = _prepare(model, optimizer, path, state or {}, overwrite, trainable_only, extra, copies=True)

    def finish() -> None:
        with talking_over(group):
            save.finish()

    executor = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
    _last = executor.submit(finish)
    executor.shutdown(wait=False)
    return _last


def _own_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for saves in the background. Collective at the first call."""
    if world_size() == 1:
        return None
    world = dist.group.WORLD
    if _groups.get("world") is not world:
        _groups["own"] = dist.new_group(backend="gloo")
        _groups["world"] = world
    return _groups["own"]


_groups: dict[str, dist.ProcessGroup | None] = {}
"""The group of `_own_group`, and the default group that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save whose values are taken."""

    staging: Staging | None
    """On rank 0."""
    directory: str
    state: State
    own: tuple[str, ...]
    """Names of train state."""
    mesh: Mesh | None

    def finish(self) -> None:
        """Write, check and publish. Collective."""
        try:
            together(lambda: _write(self.state, self.own, self.directory))
            parts = gather(together(lambda: _digests(self.directory)))
            digests = {name: digest for part in parts for name, digest in part.items()}
            together(lambda: None if self.staging is None else _publish(self.staging, self.state, digests, self.mesh))
        finally:
            if self.staging is not None:
                self.staging.discard()


def _prepare(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    own: Mapping[str, object],
    overwrite: bool,
    trainable_only: bool,
    extra: Mapping[str, torch.Tensor] | None,
    *,
    copies: bool = False,
) -> _Save:
    """Take the destination, and every value as it is now (`copies`: in host memory). Collective."""
    if _last is not None:
        wait([_last])
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

        def take() -> State:
            check_names(own)
            state = _state_of(model, optimizer, trainable_only=trainable_only, extra=extra)
            return state | _parts_of(model, own)

        state = together(take) | collect(own)
        if copies:
            state = together(lambda: cast("State", DefaultStager(_COPIES).stage(state)))
        return _Save(staging=staging, directory=directory, state=state, own=tuple(own), mesh=_mesh(model, state))
    except BaseException:
        if staging is not None:
            staging.discard()
        raise


_COPIES = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def _state_of(
    model: nn.Module, optimizer: Optimizer | None, *, trainable_only: bool, extra: Mapping[str, torch.Tensor] | None
) -> State:
    _check_values(model, "model")
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


def _parts_of(model: nn.Module, own: Mapping[str, object]) -> State:
    """Return the state of the modules and optimizers among train state."""
    models = models_of(model, own)
    found: State = {}
    for name, value in own.items():
        if isinstance(value, nn.Module):
            _check_values(value, f"state[{name!r}]")
            found[name] = get_model_state_dict(value)
        elif isinstance(value, Optimizer):
            found[name] = get_optimizer_state_dict(model_of(value, name, models), value)
    return found


def _check_values(model: nn.Module, where: str) -> None:
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if meta:
        raise UsageError(
            f"{len(meta)} tensors of the model have no values: {first_few(meta, 4)}",
            where=where,
            hint="load a checkpoint first",
        )


def _write(state: State, own: Sequence[str], directory: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as it should be
        save(
            state,
            storage_writer=_Writer(directory),
            planner=_Planner(own),
            process_group=current_group(),
            no_dist=world_size() == 1,
        )


class _Planner(DefaultSavePlanner):
    """The stock planner, which forgets empty dicts: those of train state are stored as items."""

    def __init__(self, own: Sequence[str]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._own = own

    def set_up_planner(
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for name in self._own:
            for path, leaf in leaves(state_dict[name], (name,)):
                if isinstance(leaf, Mapping):
                    self.state_dict[fqn_of(path)] = {}
                    self.mappings[fqn_of(path)] = path


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
    values = {fqn_of(path): leaf for path, leaf in leaves(state, ())}  # not those of other ranks alone
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
                placements={} if mesh is None else placements_of(values.get(entry.fqn)),
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
    meshes = [leaf.device_mesh for _, leaf in leaves(state, ()) if isinstance(leaf, DTensor)]
    widest = max(meshes, key=lambda mesh: mesh.ndim, default=None) if plan is None else plan.mesh
    if widest is None or widest.size() != world_size():
        return None
    found = mesh_of(widest)
    known = mesh_axes(widest)
    # Another model's mesh may be none of its parts: then no record is better than one that is right for one model.
    return found if all(axis in known for mesh in set(meshes) for axis in mesh_axes(mesh)) else None
