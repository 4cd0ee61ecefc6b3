"""Save a sharded model and its optimizer: all ranks write, one publishes, and nobody believes in half a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

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
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.item_frames import digest_frames
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, build_manifest
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.table import check_replaceable
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.checks.verify import verify
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.fsdp2.collective import current_group, from_rank0, gather, talk_over, this_rank, together, world_size
from ckpt_tools.fsdp2.internals import mesh_axes
from ckpt_tools.fsdp2.local import placements_of
from ckpt_tools.fsdp2.mesh import mesh_of
from ckpt_tools.fsdp2.state import MODEL_KEY, OPTIMIZER_KEY, check_names, collect, fqn_of, leaves, model_of, models_of
from ckpt_tools.fsdp2.wrap import plan_of
from ckpt_tools.storage.staging import Staging
from ckpt_tools.text import first_few
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.plan import blob_name, copy_span

State = dict[str, Any]
"""Nested state dict: "model" → name → tensor, "optimizer" → "state" and "param_groups", name → train state."""
_COPIES = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class _Saving(Future[None]):
    """A save in the background, which knows whether somebody has asked how it ended."""

    is_asked = False

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot  # Number of its group, the same on all ranks

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, and raise what went wrong."""
        self.is_asked = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return what went wrong."""
        self.is_asked = True
        return super().exception(timeout)

    def run(self, finish: Callable[[], None]) -> None:
        """Do the work of it."""
        try:
            finish()
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks
            self.set_exception(error)
        else:
            self.set_result(None)


_saves: list[_Saving] = []  # That run in the background, or did when their end was last asked for
_groups: list[dist.ProcessGroup | None] = [None]
"""The default group, and groups of all its ranks for saves in the background, one for each that may run at once."""


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, object] | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
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

    Raises:
        DestinationExistsError: `path` exists.
        UsageError: Train state that could not be read back, or that differs between ranks.
        CkptError: Anything else that went wrong on another rank; what goes wrong on this one is raised as it is.
    """
    _settle(0)
    _prepare(model, optimizer, path, state or {}, overwrite, trainable_only)()


def async_save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, object] | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    at_once: int = 1,
) -> Future[None]:
    """Do as `save_checkpoint`, in the background: return once everything is copied to host memory.

    Collective. Training may go on at once, and the next save waits for this one. Call `result()` of what is returned
    before anything relies on the checkpoint, and before the process group is destroyed: it raises what went wrong.
    Where no rank asks, a later save raises it.

    Args:
        model: This and the others are those of `save_checkpoint`.
        optimizer: Its state is saved too.
        path: A directory that all ranks see.
        state: What else to save, by name.
        overwrite: Replace an existing checkpoint.
        trainable_only: Leave frozen parameters of `model` out.
        at_once: How many saves may run at once, this one included; each holds its own copy. Other paths each.

    Returns:
        Done when the checkpoint is published, on every rank.

    Raises:
        DestinationExistsError: `path` exists.
        UsageError: As `save_checkpoint`.
    """
    at_once = max(at_once, 1)
    _settle(at_once - 1)
    if _groups[0] is not dist.group.WORLD:
        _groups[:] = [dist.group.WORLD]
    slot = next(number for number in range(1, at_once + 1) if number not in {save.slot for save in _saves})
    while world_size() > 1 and len(_groups) <= slot:
        _groups.append(dist.new_group(backend="gloo"))
    finish = _prepare(model, optimizer, path, state or {}, overwrite, trainable_only, copies=True)
    group = _groups[slot] if world_size() > 1 else None
    executor = ThreadPoolExecutor(1, "ckpt-save", initializer=talk_over, initargs=(group,))
    saving = _Saving(slot)
    _saves.append(saving)
    executor.submit(saving.run, finish)
    executor.shutdown(wait=False)
    return saving


def _settle(left: int) -> None:
    """Wait for the oldest saves until `left` may still run; raise what went wrong where no rank has asked."""
    while len(_saves) > left:
        saving = _saves.pop(0)
        wait([saving])
        is_asked, error = saving.is_asked, saving.exception()
        if error is not None and not any(gather(is_asked)):
            raise error


def _prepare(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    own: Mapping[str, object],
    overwrite: bool,
    trainable_only: bool,
    *,
    copies: bool = False,
) -> Callable[[], None]:
    """Take the destination, and every value as it is now (`copies`: in host memory). Collective, as what it returns."""
    destination = os.fspath(path)
    staging: Staging | None = None

    def begin() -> str:
        nonlocal staging
        if overwrite:
            check_replaceable(destination)
        staging = Staging(destination, overwrite=overwrite)
        staging.begin()
        return staging.directory

    def discard() -> None:
        if staging is not None:
            staging.discard()

    def finish() -> None:
        try:
            together(lambda: _write(state, own, directory))
            parts = gather(together(lambda: _digests(directory)))
            digests = {name: digest for part in parts for name, digest in part.items()}
            together(lambda: None if staging is None else _publish(staging, state, digests, mesh))
        finally:
            discard()

    try:
        directory = from_rank0(begin)
        state = together(lambda: _parts_of(model, optimizer, own, trainable_only)) | collect(own)
        if copies:
            state = together(lambda: cast("State", DefaultStager(_COPIES).stage(state)))
        mesh = _mesh(model, state)
    except BaseException:
        discard()
        raise
    return finish


def _parts_of(model: nn.Module, optimizer: Optimizer | None, own: Mapping[str, object], trainable_only: bool) -> State:
    """Return the state of all modules and optimizers."""
    check_names(own)
    models = models_of(model, own)
    found: State = {}
    for name, value in {MODEL_KEY: model, OPTIMIZER_KEY: optimizer, **own}.items():
        is_part = trainable_only and name in (MODEL_KEY, OPTIMIZER_KEY)
        options = StateDictOptions(ignore_frozen_params=is_part)
        if isinstance(value, nn.Module):
            meta = [fqn for fqn, tensor in (*value.named_parameters(), *value.named_buffers()) if tensor.is_meta]
            if meta:
                raise UsageError(
                    f"tensors of the model have no values ({len(meta)} in all): {first_few(meta, 4)}",
                    where=f"save_checkpoint: {name}",
                    hint="load a checkpoint first",
                )
            found[name] = get_model_state_dict(value, options=options)
        elif isinstance(value, Optimizer):
            owner = model if value is optimizer else model_of(value, name, models)
            found[name] = get_optimizer_state_dict(owner, value, options=options)
    if trainable_only:  # what 4-bit layers add to a state dict belongs to their frozen weights
        companions = tuple(f"{strip_wrappers(name)}." for name, p in model.named_parameters() if not p.requires_grad)
        found[MODEL_KEY] = {name: t for name, t in found[MODEL_KEY].items() if not name.startswith(companions)}
    return found


def _write(state: State, own: Iterable[str], directory: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as it should be
        save(
            state,
            storage_writer=_PathlessWriter(directory),
            planner=_Planner(own),
            process_group=current_group(),
            no_dist=world_size() == 1,
        )


class _Planner(DefaultSavePlanner):
    """The stock planner, which forgets empty dicts: those of train state are stored as items."""

    def __init__(self, own: Iterable[str]) -> None:
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


class _PathlessWriter(FileSystemWriter):
    """The stock writer, without the path of this machine in `.metadata`."""

    def storage_meta(self) -> StorageMeta | None:
        """Return no identity of the checkpoint but the save's own."""
        return StorageMeta(save_id=self.save_id)


def _digests(directory: str) -> dict[str, str]:
    """Read this rank's share of what was written; return the digests, CRC-32s are compared with the writers'."""
    with open_path(directory, format="dcp", as_part=True) as written:
        blobs = [copy_span(blob_name(blob), blob.span, 0).source for blob in written.checkpoint.blobs]
        # Tensors and blobs (as bytes), large ones spread over the ranks.
        entries = sorted((*written.checkpoint.tensors, *blobs), key=lambda entry: -entry.nbytes)
        own = entries[this_rank() :: world_size()]
        resolved = [entry if entry.fqn.startswith("\0") else written.resolve(entry) for entry in own]
        return scan(resolved, written.source, num_workers=1).digests


def _publish(staging: Staging, state: State, digests: Mapping[str, str], mesh: Mesh | None) -> None:
    files = staging.adopt()
    with open_path(staging.directory, format="dcp", as_part=True) as written:
        metadata = written.source.read(METADATA_NAME, 0, written.source.size(METADATA_NAME))
        checked = verify(written, level="structure", num_workers=1)
        if not checked.ok:
            finding = checked.errors[0]
            raise CkptError(
                f"the written checkpoint failed verification: {finding.what}",
                where=finding.where,
                hint="nothing was published",
            )
        manifest = _manifest(written, files, state, digests, metadata, mesh)
    staging.take(METADATA_NAME)
    staging.write_document(MANIFEST_NAME, build_manifest(manifest))
    staging.write_document(METADATA_NAME, metadata)
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
