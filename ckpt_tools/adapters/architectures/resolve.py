"""From a module's name in any spelling to the module: by the tables, never by guessing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.adapters.architectures.architecture import Architecture, Part
from ckpt_tools.adapters.architectures.rule import Match, Spelling, fill
from ckpt_tools.errors import UsageError

_ROOTS = ("", "diffusion_model.", "model.diffusion_model.")
"""What may stand in front of a native path."""
_LANGUAGE_MODEL = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks|block|layer)\.\d+\..*(?:attn|attention|mlp|feed_forward|experts|ffn).*"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a pipeline."""

    part: Part
    match: Match
    """Its rule, and whether it was called as its authors or as diffusers call it."""

    @property
    def native(self) -> str:
        """Path in the authors' implementation."""
        return self.match.native()

    def spelled(self, spelling: Spelling) -> str:
        """Return the native path, or the one in another implementation of the authors' model."""
        names = self.match.rule.aliases[:1] if spelling == "alias" else ()
        return fill((*names, self.match.rule.native)[0], self.match.numbers)

    @property
    def parts(self) -> tuple[str, ...]:
        """Paths of the parts that another implementation of the authors' model has apart."""
        return tuple(fill(path, self.match.numbers) for path in self.match.rule.parts)

    @property
    def diffusers(self) -> tuple[str, ...]:
        """Paths in diffusers of all modules that the rule ties to the native one."""
        if self.part.is_encoder:
            return (self.match.native(),)
        return self.match.diffusers()


def readings(path: str, architecture: Architecture) -> tuple[Place, ...]:
    """Return every module that `path` can mean in `architecture`; one unless the name is unknown or ambiguous."""
    found: dict[tuple[str, str, int | None], Place] = {}
    for part in architecture.parts:
        for name in _inner_names(path, part):
            for match in part.names.find(name):
                key = (part.component, match.native(), None if match.rule.step == "same" else match.part)
                found.setdefault(key, Place(part, match))
    return tuple(found.values())


def _inner_names(path: str, part: Part) -> Iterable[str]:
    """Yield what is left of `path` when it is a module of `part`."""
    prefixes = [f"{part.component}.", f"{part.comfyui}.", *(f"{prefix}_" for prefix in part.kohya)]
    if not part.is_encoder:
        prefixes += _ROOTS
    for prefix in dict.fromkeys(prefixes):
        if path.startswith(prefix):
            yield path[len(prefix) :]


def place(path: str, architecture: Architecture) -> Place:
    """Return the one module that `path` means; raise UsageError for none or several."""
    found = readings(path, architecture)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"{path!r} is not a known module of {architecture.title}",
            where=path,
            hint="is it an adapter of another model? --architecture names the right one",
        )
    shown = " or ".join(f"{each.part.component}.{each.native}" for each in found)
    raise UsageError(f"{path!r} can mean {shown}", where=path)


def is_language_model_path(path: str) -> bool:
    """Does `path` look like a module of a language model's layers?"""
    return _LANGUAGE_MODEL.fullmatch(path) is not None


def underscored(base_names: Collection[str]) -> Mapping[str, str | None]:
    """Return, by its name with underscores, every module of a base model; None where two have the same."""
    table: dict[str, str | None] = {}
    for name in base_names:
        module = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
        flat = module.replace(".", "_")
        table[flat] = module if table.get(flat, module) == module else None
    return table


def unflatten(path: str, base_names: Collection[str]) -> str:
    """Return the module of a base model whose flattened name is `path` ("lora_unet_…", "lycoris_…", or bare)."""
    table = underscored(base_names)
    flat = re.sub(r"^(?:lora_unet|lora_transformer|lora_prior_unet|lycoris|lora)_", "", path)
    found = table.get(flat)
    if found is None:
        problem = "names two modules of the base" if flat in table else "does not name a module of the base"
        raise UsageError(f"{path!r} {problem}", where=path)
    return found
