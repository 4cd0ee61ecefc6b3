"""Models that a config.json describes: what every library's have in common. No code from a checkpoint is run."""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import nn

from ckpt_tools.errors import RefusedConfigError, UsageError
from ckpt_tools.models.recipe import Batch, Recipe, without_dropout
from ckpt_tools.sandbox.audit import HINT, demand_sandbox
from ckpt_tools.sandbox.check_config import check_config, without_code_keys

USE_FACTORY = "use --factory pkg.mod:callable"
FEEDS_ITSELF = f"{USE_FACTORY}, whose model has example_batch(batch_size, seq_len)"  # For a model that ckpt cannot feed
LAYERDROP = re.compile(r".*layer_?drop(_rate|_prob)?")  # Keys of a config that drop whole layers
_DROPOUT = re.compile(r".*(dropout|drop_rate|drop_path|pdrop|layerdrop|drop_path_rate)(_rate|_prob)?")


class ConfigRecipe(Recipe):
    """The model of a config.json; `otherwise` says in hints what to do instead, where there is no `--factory`."""

    depth_keys: re.Pattern[str]  # Keys of a config that say how many layers a stack has

    def __init__(self, config: Mapping[str, Any], where: str, *, otherwise: str | None = None) -> None:
        check_config(config, where)
        self._otherwise = otherwise
        self._values: dict[str, Any] = copy.deepcopy(without_code_keys(config))
        self.where = where
        if self._values.get("quantization_config") is not None:
            what = "the checkpoint is quantised, and its weights cannot be trained as they are"
            raise UsageError(what, where=self.where, hint="start from the checkpoint that it was made from")
        self.title = self._find_class(otherwise or USE_FACTORY)

    @abstractmethod
    def _find_class(self, otherwise: str) -> str:
        """Import the class that the config names, before the sandbox; return its name."""

    @abstractmethod
    def _construct(self) -> nn.Module:
        """Return the model as the config says, on the default device; whatever a class raises may pass.

        It builds with `settled`, and passes what the library adds of its own to `turn_off`.
        """

    def build(self) -> nn.Module:
        """Return the model as the config says, without cache, without dropout unless it is kept; in the sandbox only.

        Layers are never dropped: ranks that skip different ones would wait for each other.
        """
        demand_sandbox()
        try:
            model = self._construct()
        except UsageError:
            raise
        except Exception as error:  # every model checks its config in its own way
            found = refusal(error, self.title, self.where)
            if self.is_cut and not isinstance(found, RefusedConfigError):
                found.what = (
                    f"ckpt cut the model down to what fits here, and its class does not support that: {found.what}"
                )
                found.hint = "pass a smaller config as --model, or run where there is more memory"
            raise found from error
        if not self.keeps_dropout:
            without_dropout(model)
        return model.train()

    def settled(self) -> dict[str, Any]:
        """Return the config to build with, of the caller's own."""
        values = copy.deepcopy(self._values)
        for part in nested(values):
            self.turn_off(part)
        return values

    def turn_off(self, values: dict[str, Any]) -> None:
        """Set to 0 what drops in a config: layers alone where dropout is kept."""
        pattern = LAYERDROP if self.keeps_dropout else _DROPOUT
        for key, value in values.items():
            if pattern.fullmatch(key) and _is_number(value):
                values[key] = type(value)(0)  # configs are strict about the type

    def batch(self, model: nn.Module, seed: int) -> Batch:
        """Return the batch of a seed."""
        try:
            return super().batch(model, seed)
        except UsageError:
            raise
        except Exception as error:  # configs may say anything of sizes and tokens
            text = str(error).partition("\n")[0]
            what = f"ckpt cannot make a batch for a {self.title}: {type(error).__name__}: {text}"
            raise UsageError(what, where=self.where, hint=self._otherwise or FEEDS_ITSELF) from error

    @property
    def num_layers(self) -> int | None:
        """Layers of the deepest stack."""
        depths = [value for values in nested(self._values) for value in self._depths(values).values()]
        return max(depths, default=None)

    def shallower(self, num_layers: int) -> Self | None:
        """Cut every stack to `num_layers`, and what the config says layer by layer with it."""
        full = self.num_layers
        if full is None or full <= num_layers:
            return None
        values = copy.deepcopy(self._values)
        for part in nested(values):
            depths = self._depths(part)
            for key, depth in depths.items():
                part[key] = min(depth, num_layers)
            self._cut_lists(part, depths, num_layers)
        cut = type(self)(values, self.where, otherwise=self._otherwise)
        cut.keeps_dropout = self.keeps_dropout
        cut.is_cut = True
        cut.title = f"{self.title} cut to {num_layers} of {full} layers"
        return cut

    def _depths(self, values: Mapping[str, Any]) -> dict[str, int]:
        found = {key: value for key, value in values.items() if self.depth_keys.fullmatch(key)}
        return {key: value for key, value in found.items() if type(value) is int and value > 0}

    def _cut_lists(self, part: dict[str, Any], depths: Mapping[str, int], num_layers: int) -> None:
        """Cut what a config lists layer by layer."""


def stopped(error: Exception, title: str, where: str) -> UsageError | None:
    """Return what it means when the sandbox or limits made a model's class raise; None when they have no part in it."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "bad_alloc" in text:
        return UsageError(f"building a {title} needs more memory than allowed: {text or 'MemoryError'}", where=where)
    if isinstance(error, OSError) or "Permission denied" in text:
        what = f"building a {title} from its config needs files or hosts, which ckpt refuses: {text}"
        return RefusedConfigError(what, where=where, hint=HINT)
    return None


def refusal(error: Exception, title: str, where: str) -> UsageError:
    """Return what it means that a model's class has raised while it was built in the sandbox."""
    found = stopped(error, title, where)
    if found is not None:
        return found
    text = str(error).strip().partition("\n")[0]
    return UsageError(f"the config does not describe a {title}: {type(error).__name__}: {text}", where=where)


def _is_number(value: object) -> bool:
    """Is it a number? A bool switches something on (ESM's `token_dropout`), and draws nothing."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def nested(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs in it (text, vision, …)."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from nested(value)
