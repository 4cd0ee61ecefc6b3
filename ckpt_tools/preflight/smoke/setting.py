"""From options to what will be run: ranks, mesh, strategy, dtypes, and the recipe of the model. Imports torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch

from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.layout import Mesh, parse_mesh
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import NF4_TORCH, refuse_older
from ckpt_tools.fsdp2 import Policy, Precision, parse_policy
from ckpt_tools.fsdp2.mesh import FSDP_AXES, TP_AXIS
from ckpt_tools.models.config import config_beside
from ckpt_tools.models.recipe import ModuleRecipe, Recipe
from ckpt_tools.models.recipe_of import recipe_of
from ckpt_tools.models.replace_parameters import DTYPES
from ckpt_tools.preflight.smoke.options import DEFAULT_RANKS, SmokeOptions
from ckpt_tools.sandbox.journal import RankLog

DEFAULT_TIMEOUT_S = 120.0  # Of a phase, for a model of no size
_SLOW_BYTES_PER_S = 20e6
"""What a phase does at least with a model: read it from a network disk, or compute with it on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeSetting:
    """What is run."""

    options: SmokeOptions
    mesh: Mesh
    policy: Policy
    recipe: Recipe
    timeout_s: float  # Seconds that a phase may take

    @property
    def dp_size(self) -> int:
        """Ranks with batches of their own."""
        return self.mesh.size(FSDP_AXES[0]) * self.mesh.size(FSDP_AXES[1])

    def dp_index(self, rank: int) -> int:
        """Which batch a rank gets; the ranks of one tensor-parallel group share one."""
        index = 0
        for (name, size), position in zip(self.mesh.axes, self.mesh.coordinate(rank), strict=True):
            if name != TP_AXIS:
                index = index * size + position
        return index

    @property
    def has_tp(self) -> bool:
        """Are layers cut as well?"""
        return self.mesh.size(TP_AXIS) > 1

    def recipe_of(self, num_layers: int | None) -> Recipe:
        """Return the recipe, cut to this depth; None leaves it as it is."""
        return self.recipe if num_layers is None else self.recipe.shallower(num_layers) or self.recipe


def resolve(options: SmokeOptions, *, world_size: int | None = None) -> SmokeSetting:
    """Decide everything that does not depend on the machine; `world_size` is torchrun's."""
    refuse_absent(options)
    precision = Precision(param_dtype=DTYPES.get(options.param_dtype), reduce_dtype=DTYPES.get(options.reduce_dtype))
    policy = None if options.strategy is None else parse_policy(options.strategy, precision=precision)
    mesh = _find_mesh(options, policy, world_size)
    if policy is None:
        policy = parse_policy(_strategy_for(mesh), precision=precision)
    recipe = find_recipe(options)
    recipe.keeps_dropout = mesh.size(TP_AXIS) == 1  # ranks of one layer would draw for their own part of it
    timeout_s = options.timeout or DEFAULT_TIMEOUT_S + _source_bytes(options) / _SLOW_BYTES_PER_S
    return SmokeSetting(options=options, mesh=mesh, policy=policy, recipe=recipe, timeout_s=timeout_s)


def _source_bytes(options: SmokeOptions) -> int:
    if options.source is None:
        return 0
    with open_path(os.fspath(options.source), as_part=True) as opened:
        return opened.checkpoint.total_bytes


def _find_mesh(options: SmokeOptions, policy: Policy | None, world_size: int | None) -> Mesh:
    nproc = world_size or options.nproc
    if options.mesh is not None:
        text = str(options.mesh)
        needs = "-1" in text.replace(" ", "").replace("=", ",").split(",")
        mesh = parse_mesh(text, world_size=(nproc or DEFAULT_RANKS) if needs else None)
        if nproc is not None and mesh.world_size != nproc:
            raise UsageError(
                f"the mesh {mesh} has {mesh.world_size} ranks, torchrun started {nproc}", hint="set one axis to -1"
            )
    elif policy is not None and policy.strategy == "hybrid_shard":
        nproc = nproc or 2 * DEFAULT_RANKS
        if nproc % 2:
            raise UsageError(f"hybrid_shard needs an even number of ranks, got {nproc}", hint="or add --mesh")
        mesh = Mesh((("dp_replicate", 2), ("dp_shard", nproc // 2)))
    else:
        axis = "dp_replicate" if policy is not None and policy.strategy == "no_shard" else "dp_shard"
        mesh = Mesh(((axis, nproc or DEFAULT_RANKS),))
    if not any(name in FSDP_AXES for name, _ in mesh.axes):
        # Without an axis for FSDP there is nothing to test; one of size 1 changes no rank.
        mesh = Mesh((("dp_shard", 1), *mesh.axes))
    return mesh


def _strategy_for(mesh: Mesh) -> str:
    names = {name for name, _ in mesh.axes}
    if "dp_replicate" not in names:
        return "full_shard"
    return "hybrid_shard" if "dp_shard" in names else "no_shard"


def other_world(setting: SmokeSetting, log: RankLog) -> tuple[SmokeSetting | None, str]:
    """Return what a world of another size runs, which reloads; or None and why there is none."""
    mesh = _other_mesh(setting.mesh)
    devices = log.fact("num_devices", int)
    if log.fact("device", str) == "cuda" and devices is not None and devices < mesh.world_size:
        return None, f"a world of {mesh.world_size} ranks needs as many GPUs, but there are {devices}"
    policy = setting.policy
    if policy.strategy == "hybrid_shard" and len([n for n, _ in mesh.axes if n != TP_AXIS]) < 2:
        policy = Policy(strategy="full_shard", precision=policy.precision)
    options = replace(setting.options, mesh=str(mesh), nproc=None, strategy=policy.strategy)
    return replace(setting, mesh=mesh, policy=policy, options=options), ""


def _other_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of another size: fewer ranks along the first axis that can spare some, or two for one."""
    sizes = dict(mesh.axes)
    spare = next((name for name in (*reversed(FSDP_AXES), TP_AXIS) if sizes.get(name, 1) > 1), None)
    if spare is None:
        changed, size = next(name for name in reversed(FSDP_AXES) if name in sizes), 2
    else:
        changed, size = spare, 1 if spare == TP_AXIS else sizes[spare] // 2
    return Mesh(tuple((name, size if name == changed else own) for name, own in mesh.axes))


def find_recipe(options: SmokeOptions) -> Recipe:
    """Return how to build the model."""
    if options.factory is not None:
        return ModuleRecipe(options.factory)
    if (named := options.read_model()) is not None:
        return recipe_of(named.values, named.where)
    if options.source is None:
        return ModuleRecipe()
    with open_path(os.fspath(options.source), as_part=True) as opened:
        config = config_beside(opened.asset_source or opened.source)
        if config is not None:
            return recipe_of(config.values, config.where)
        if _is_builtin(opened):
            return ModuleRecipe()
        raise UsageError(
            "the model is not known: there is no config.json beside the weights",
            where=opened.source.root,
            hint="add --model DIR (with a config.json), or --factory pkg.mod:callable",
        )


def _is_builtin(opened: Opened) -> bool:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in ModuleRecipe().build().state_dict().items()}
    return {strip_wrappers(entry.fqn): entry.shape for entry in opened.checkpoint.tensors} == wanted


def refuse_absent(options: SmokeOptions) -> None:
    """Raise UsageError for an option whose library is not installed, or too old."""
    quantize = None if options.quantize is None else f"--quantize {options.quantize}"
    needed = ((quantize, "bitsandbytes", "qlora"), ("--lora" if options.lora else None, "peft", "hf"))
    for option, library, extra in needed:
        if option is not None and importlib.util.find_spec(library) is None:
            what = f"{option} needs {library}, which is not installed"
            raise UsageError(what, hint=f"pip install 'ckpt-tools[{extra}]'")
    for option, library, _ in needed:
        if option is not None:
            refuse_older(library, option)
    if quantize is not None:
        refuse_older("torch", quantize, NF4_TORCH)
