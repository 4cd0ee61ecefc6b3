"""The model of one run: as deep as the machine allows, in the checkpoint's dtypes, with adapters when asked for."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.globs import find_named
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.fsdp2 import LoadReport, add_lora, load_base, load_checkpoint, load_quantised, quantise_linears
from ckpt_tools.fsdp2.lora import base_name, linear_layers
from ckpt_tools.fsdp2.names import match_names, shapes_of
from ckpt_tools.fsdp2.ties import tied_groups
from ckpt_tools.models.recipe import Recipe
from ckpt_tools.models.replace_parameters import replace_parameters
from ckpt_tools.preflight.smoke.setting import SmokeSetting
from ckpt_tools.text import first_few
from ckpt_tools.units import format_size

_RANDOM = {"init_weights": False}
_LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "init_lora_weights": False}
# All factors random: with B = 0, as training begins, the gradient of A would be 0 and prove nothing.
_ADAPTERS: Mapping[str, Mapping[str, object]] = {
    "lora": _LORA,
    "dora": {**_LORA, "use_dora": True},
    "loha": {"peft_type": "LOHA", "r": 8, "alpha": 8, **_RANDOM},
    "lokr": {"peft_type": "LOKR", "r": 8, "alpha": 8, **_RANDOM},
    "oft": {"peft_type": "OFT", "r": 0, "oft_block_size": 4, **_RANDOM},
    "boft": {"peft_type": "BOFT", "boft_block_size": 4, **_RANDOM},
}
"""Kind → PEFT's configuration."""
SEED = 0  # Of weights that are drawn: all of them, or a head that the checkpoint lacks
_BUDGET = 0.7  # Part of the free memory, and of the free disk, that a run may take
STATES = 4  # Parameters, gradients, and two moments of AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """How every rank, and the reference, builds the same model."""

    setting: SmokeSetting
    recipe: Recipe  # The setting's, perhaps with fewer layers
    source: str  # Checkpoint of the base model
    on_cpu: bool = False  # Build there: meta cannot

    def build_base(self) -> nn.Module:
        """Return the base model, its parameters in the dtypes of the checkpoint; on meta where that can be."""
        model = build_on("cpu" if self.on_cpu else "meta", self.recipe)
        adopt_dtypes(model, self.source)
        return model

    def build(self) -> nn.Module:
        """Return the model to shard: usually on meta but for its adapters."""
        model = self.build_base()
        return self.adapted(model)

    def adapted(self, model: nn.Module) -> nn.Module:
        """Return the base model, quantised and with adapters as the options say; quantises what is not on meta."""
        if not self.setting.options.lora:
            return model
        options = self.setting.options
        targets = linear_layers(model)
        if options.target:
            names, kind = {name: (name,) for name in targets}, "linear layer"
            chosen = set().union(*(find_named(f"--target {g}", g, names, kind=kind) for g in options.target))
            targets = [name for name in targets if name in chosen]
        if not targets:
            raise UsageError("the model has no linear layer to adapt", hint="see print(model)")
        if options.quantize == "nf4":
            quantise_linears(model)
        config = {**_ADAPTERS[options.adapter], "target_modules": targets}
        adapted: nn.Module = add_lora(model, config)
        return adapted.train()

    def load(self, model: nn.Module) -> LoadReport:
        """Load the base model's checkpoint. Collective."""
        torch.manual_seed(SEED)  # a head that it lacks starts as the reference's does
        if not self.setting.options.lora:
            return load_checkpoint(model, self.source, strict=False)
        if self.setting.options.quantize is not None:
            return self.load_saved(model, self.source)
        return load_base(model, self.source, strict=False)

    def load_saved(self, model: nn.Module, path: str) -> LoadReport:
        """Load what `save_checkpoint` has written. Collective."""
        if self.setting.options.quantize is None:
            return load_checkpoint(model, path)
        return load_quantised(model, path)

    def base_name(self, fqn: str) -> str | None:
        """Return a parameter's name in the checkpoint of the base model, None for an adapter's own."""
        if not self.setting.options.lora:
            return strip_wrappers(fqn)
        return base_name(fqn)


def build_on(device: str, recipe: Recipe) -> nn.Module:
    """Build the model on a device, on the CPU with the same random numbers on every rank."""
    with torch.random.fork_rng(devices=()), torch.device(device):
        torch.manual_seed(SEED)
        return recipe.build()


def build_anyhow(recipe: Recipe, build: str) -> tuple[nn.Module, str]:
    """Build the model on meta or, where `build` says so or lets it and meta cannot, on the CPU; return why, too."""
    if build == "cpu":
        return build_on("cpu", recipe), "--build cpu"
    try:
        return build_on("meta", recipe), ""
    except CkptError:
        raise
    except Exception as error:  # whatever its __init__ does
        what = f"on the meta device it raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if build != "auto":
            hint = "use --build cpu, or leave it out"
            raise UsageError(f"cannot be built: {what}", where="--build meta", hint=hint) from error
        return build_on("cpu", recipe), what


def other_tensors(model: nn.Module, blueprint: Blueprint) -> str:
    """Say what a model on meta lacks that it has on the CPU, "" for nothing.

    Orthogonal parametrizations leave out a buffer there without a word: it is left over in the checkpoint.
    """
    shapes = shapes_of({strip_wrappers(name): t for name, t in model.state_dict(keep_vars=True).items()})
    with open_path(blueprint.source, as_part=True) as opened:
        if not match_names(opened.checkpoint, model, shapes, "auto").left:
            return ""
    wanted = {strip_wrappers(name) for name in build_on("cpu", blueprint.recipe).state_dict()}
    other = sorted(wanted ^ shapes.keys())
    return f"on the meta device it has other tensors: {first_few(other)}" if other else ""


def adopt_dtypes(model: nn.Module, source: str) -> None:
    """Give the parameters of a model on meta the dtypes that the checkpoint stores them in; what is shared stays so."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {strip_wrappers(fqn): fqn for fqn in parameters}
    shapes = shapes_of({name: parameters[fqn] for name, fqn in names.items()})
    with open_path(source, as_part=True) as opened:
        found = match_names(opened.checkpoint, model, shapes, "auto").found
    wanted: dict[int, torch.dtype] = {}
    for name, whole in found.items():
        dtype = getattr(torch, whole.dtype.torch_name or "", None)
        parameter = model.get_parameter(names[name])
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
            wanted.setdefault(id(parameter), dtype)

    def cast(parameter: nn.Parameter) -> torch.Tensor | None:
        dtype = wanted.get(id(parameter), parameter.dtype)
        return None if dtype == parameter.dtype else parameter.detach().to(dtype)

    replace_parameters(model, cast)


def write_random(recipe: Recipe, directory: str) -> None:
    """Initialise the model of `recipe` on the CPU, from a fixed seed, and write it to `directory`/model.safetensors."""
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    model = recipe.build()
    shared = {name for group in tied_groups(model) for name in group[1:]}
    state = {
        strip_wrappers(name): tensor.contiguous() for name, tensor in model.state_dict().items() if name not in shared
    }
    os.makedirs(directory, exist_ok=True)
    save_file(state, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What of a model the machine can hold twice: sharded, and as a reference."""

    num_layers: int | None  # Depth to cut to; None leaves it as it is
    has_reference: bool
    notes: tuple[str, ...]
    why_cpu: str  # Why it is built there; "" on meta


def find_fit(setting: SmokeSetting, *, num_copies: int, is_local: bool, free_bytes: int, workdir: str) -> Fit:
    """Decide how deep the model can be; with `is_local` all ranks use this machine's memory."""
    policy = setting.policy.strategy
    copies = setting.mesh.world_size if policy == "no_shard" else setting.mesh.size("dp_replicate")
    sharded = copies if is_local else copies / max(1, num_copies)
    dp = 1 if policy == "no_shard" else max(1, setting.mesh.size("dp_shard"))
    if not is_local:
        sharded = 1 / dp
    states = 1.1 if setting.options.lora else STATES
    bare, why_cpu = build_anyhow(setting.recipe, setting.options.build)
    full = _sum_bytes(bare)
    whole = setting.mesh.world_size if why_cpu and is_local else 0
    # Twice for the second model of the reload; gathered layers and activations are in the margin.
    per_byte = sharded * (states + 1) + states + 0.5 + whole
    budget = _BUDGET * free_bytes / per_byte
    disk = shutil.disk_usage(workdir).free
    budget = min(budget, _BUDGET * disk / (states - 1 if states > 2 else states))
    if full <= budget:
        return Fit(num_layers=None, has_reference=True, notes=(), why_cpu=why_cpu)
    depth = setting.recipe.num_layers
    free = f"{format_size(free_bytes)} of memory and {format_size(disk)} of disk are available"
    one = setting.recipe.shallower(1)
    two = setting.recipe.shallower(2)
    if depth is not None and one is not None and two is not None:
        try:
            least, next_one = (_sum_bytes(build_anyhow(each, setting.options.build)[0]) for each in (one, two))
            per_layer = next_one - least
        except UsageError as error:  # the class wants all its layers
            note = f"{free}: not enough for a reference, and the model cannot be built with fewer layers: {error.what}"
            return Fit(num_layers=None, has_reference=False, notes=(note,), why_cpu=why_cpu)
        if least <= budget and per_layer > 0:
            num_layers = min(depth - 1, 1 + math.floor((budget - least) / per_layer))
            note = f"{free}: the model ({format_size(full)}) is tested with {num_layers} of its {depth} layers"
            return Fit(num_layers=num_layers, has_reference=True, notes=(note,), why_cpu=why_cpu)
    note = f"{free}: not enough for a reference beside the model ({format_size(full)}); losses are not compared"
    return Fit(num_layers=None, has_reference=False, notes=(note,), why_cpu=why_cpu)


def _sum_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
