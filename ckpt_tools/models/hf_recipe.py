"""Models that a config.json describes, built through transformers (extra `hf`). No code from a checkpoint is run."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from ckpt_tools.errors import RefusedConfigError, UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.models.parameters import replace_parameters
from ckpt_tools.models.recipe import BATCH_SIZE, SEQ_LEN, Batch, Recipe, without_dropout
from ckpt_tools.text import first_few
from ckpt_tools.walls import check_config, demand_walls
from ckpt_tools.walls.audit import HINT
from ckpt_tools.walls.config import without_code_keys

_USE_FACTORY = "use --factory pkg.mod:callable"
FEEDS_ITSELF = f"{_USE_FACTORY}, whose model has example_batch(batch_size, seq_len)"
"""Hint: what to do with a model that ckpt cannot feed."""
_DEPTH = re.compile(
    r"(num_hidden_layers|num_layers|n_layers?|num_(decoder|encoder)_layers|(encoder|decoder)_layers|depth)"
)
_DROPOUT = re.compile(r".*(dropout|drop_rate|drop_path|pdrop|layerdrop|drop_path_rate)(_rate|_prob)?")
_LAYERDROP = re.compile(r".*layer_?drop(_rate|_prob)?")
_SPECIAL = re.compile(r".*token(_id|_index|_ids)?(_.*)?|.*_(id|index)")
_LABELS_LIKE_INPUT = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")


class HfRecipe(Recipe):
    """A transformers model with the config of a checkpoint.

    Args:
        config: The content of config.json.
        where: Where it came from, for messages.
        otherwise: What to do instead, for hints, where there is no `--factory`.

    Raises:
        UsageError: Transformers is not there, or has no such model; or the config is refused.
    """

    def __init__(self, config: Mapping[str, Any], where: str, *, otherwise: str | None = None) -> None:
        check_config(config, where)
        self._otherwise = otherwise
        self._values: dict[str, Any] = copy.deepcopy(without_code_keys(config))
        self.where = where
        if self._values.get("quantization_config") is not None:
            raise UsageError(
                "the checkpoint is quantised, and its weights cannot be trained as they are",
                where=self.where,
                hint="start from the checkpoint that it was made of",
            )
        self._class, self._config_class = _find_classes(self._values, where, otherwise or _USE_FACTORY)
        self.title = self._class.__name__

    def build(self) -> nn.Module:
        """Return the model as the config says, without cache, and without dropout unless it is kept; behind walls only.

        Layers are never dropped: ranks that skip different ones would wait for each other.

        Raises:
            UsageError: The class refuses the config, or it takes more memory than the walls leave.
        """
        demand_walls()
        try:
            pattern = _LAYERDROP if self.keeps_dropout else _DROPOUT
            values = copy.deepcopy(self._values)
            for part in _nested(values):
                _zero(part, pattern)
            config = self._config_class.from_dict(values)
            for each in _configs(config):
                if hasattr(each, "use_cache"):
                    each.use_cache = False
                _zero(vars(each), pattern)
            model: nn.Module = self._class(config)
        except UsageError:
            raise
        except Exception as error:  # every model checks its config in its own way
            found = refusal(error, self.title, self.where)
            if self.is_cut and not isinstance(found, RefusedConfigError):
                found.what = (
                    f"ckpt cut the model down to what fits here, and its class does not take that: {found.what}"
                )
                found.hint = "pass a smaller config as --model, or run where there is more memory"
            raise found from error
        _follow_device(model)
        if not self.keeps_dropout:
            without_dropout(model)
        return model.train()

    def batch(self, model: nn.Module, seed: int) -> Batch:
        """Return the batch of a seed.

        Raises:
            UsageError: ckpt does not know what to feed this model.
        """
        try:
            return super().batch(model, seed)
        except UsageError:
            raise
        except Exception as error:  # configs may say anything of sizes and tokens
            text = str(error).partition("\n")[0]
            raise UsageError(
                f"ckpt cannot make a batch for a {self.title}: {type(error).__name__}: {text}",
                where=self.where,
                hint=self._otherwise or FEEDS_ITSELF,
            ) from error

    def make_batch(self, model: nn.Module) -> Batch:
        """Draw what the class takes: tokens or pixels, and labels."""
        config: Any = model.config
        names = inspect.signature(type(model).forward).parameters
        otherwise = self._otherwise or _USE_FACTORY
        batch: Batch = {}
        if "input_ids" in names:
            num_images = _image_tokens(config) if "pixel_values" in names else 0
            batch["input_ids"] = _draw_tokens(config, num_images)
            if num_images:
                batch["pixel_values"] = _draw_pixels(config.vision_config, self.where, otherwise)
        elif "pixel_values" in names:
            batch["pixel_values"] = _draw_pixels(config, self.where, otherwise)
        else:
            takes = ", ".join(list(names)[1:4])
            raise UsageError(
                f"no batch is known for a {self.title}, whose forward takes {takes}, …",
                where=self.where,
                hint=self._otherwise or FEEDS_ITSELF,
            )
        if "labels" in names and (labels := _draw_labels(self.title, config, batch)) is not None:
            batch["labels"] = labels
        elif {"start_positions", "end_positions"} <= set(names):
            batch["start_positions"] = torch.randint(0, SEQ_LEN, (BATCH_SIZE,))
            batch["end_positions"] = torch.randint(0, SEQ_LEN, (BATCH_SIZE,))
        elif "decoder_input_ids" in names:
            batch["decoder_input_ids"] = batch["input_ids"].clone()
        return batch

    def notes_on(self, batch: Batch) -> tuple[str, ...]:
        """Say when a model that sees gets nothing to see, and when its layers are no longer dropped."""
        notes = []
        if "vision_config" in self._values and "pixel_values" not in batch:
            notes.append("the batch is text only: parts that take images or sound are loaded and saved, but not run")
        dropped = {key for part in _nested(self._values) for key in part if _LAYERDROP.fullmatch(key) and part[key]}
        if dropped and self.keeps_dropout:
            what = "ranks that skip different layers would wait for each other for ever"
            notes.append(f"{first_few(sorted(dropped))} is off: under FSDP, {what}")
        return tuple(notes)

    @property
    def num_layers(self) -> int | None:
        """Layers of the deepest stack."""
        depths = [value for values in _nested(self._values) for value in _depths(values).values()]
        return max(depths, default=None)

    def shallower(self, num_layers: int) -> Recipe | None:
        """Cut every stack to `num_layers`, and what the config says layer by layer with it."""
        full = self.num_layers
        if full is None or full <= num_layers:
            return None
        values = copy.deepcopy(self._values)
        for part in _nested(values):
            depths = _depths(part)
            for key, depth in depths.items():
                part[key] = min(depth, num_layers)
            for key, value in part.items():
                if isinstance(value, list) and len(value) in depths.values():
                    part[key] = value[:num_layers]
        cut = HfRecipe(values, self.where, otherwise=self._otherwise)
        cut.keeps_dropout = self.keeps_dropout
        cut.is_cut = True
        cut.title = f"{self.title} cut to {num_layers} of {full} layers"
        return cut


def _follow_device(model: nn.Module) -> None:
    """Move to meta what a class makes elsewhere when all is to be there: XLNet's legacy constructors ask nobody."""
    if torch.get_default_device().type == "meta":
        replace_parameters(model, lambda parameter: None if parameter.is_meta else parameter.detach().to("meta"))


def stopped(error: Exception, title: str, where: str) -> UsageError | None:
    """Return what it means when walls or limits made a model's class raise; None when they have no part in it."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "bad_alloc" in text:
        return UsageError(f"building a {title} takes more memory than it may: {text or 'MemoryError'}", where=where)
    if isinstance(error, OSError) or "Permission denied" in text:
        return RefusedConfigError(
            f"building a {title} as the config says reaches for files or hosts: {text}: refused", where=where, hint=HINT
        )
    return None


def refusal(error: Exception, title: str, where: str) -> UsageError:
    """Return what it means that a model's class has raised while it was built behind walls."""
    found = stopped(error, title, where)
    if found is not None:
        return found
    text = str(error).strip().partition("\n")[0]
    return UsageError(f"the config does not describe a {title}: {type(error).__name__}: {text}", where=where)


def _find_classes(config: Mapping[str, Any], where: str, otherwise: str) -> tuple[Any, Any]:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError("the config names no architecture", where=where, hint=otherwise)
    refuse_older("transformers", f"building a {names[0]}")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UsageError(
            f"building a {names[0]} needs transformers",
            where=where,
            hint=f"pip install 'ckpt-tools[hf]', or {otherwise}",
        ) from error
    found = getattr(transformers, names[0], None)
    # The name comes from a file: only a model class may be called.
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)) or found.config_class is None:
        custom = " (it brings code of its own, which is not run)" if "auto_map" in config else ""
        raise UsageError(
            f"transformers {transformers.__version__} has no model class {names[0]}{custom}",
            where=where,
            hint=otherwise,
        )
    return found, found.config_class


def _is_number(value: object) -> TypeGuard[int | float]:
    """Is it a number? A bool switches something on (ESM's `token_dropout`), and draws nothing."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nested(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs in it (text, vision, …)."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _nested(value)


def _depths(values: Mapping[str, Any]) -> dict[str, int]:
    return {key: value for key, value in values.items() if _DEPTH.fullmatch(key) and type(value) is int and value > 0}


def _configs(config: Any) -> Iterator[Any]:  # noqa: ANN401 - transformers' own
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            yield from _configs(part)


def _zero(values: dict[str, Any], pattern: re.Pattern[str]) -> None:
    """Set what is called so to 0; configs are strict about the type."""
    for key, value in values.items():
        if pattern.fullmatch(key) and _is_number(value):
            values[key] = type(value)(0)


def _image_tokens(config: Any) -> int:  # noqa: ANN401 - transformers' own
    """Return how many tokens stand for an image, where one image is one square of patches (LLaVA); else 0."""
    vision = getattr(config, "vision_config", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    is_known = config.model_type == "llava" and config.vision_feature_select_strategy == "default"
    return (size // patch) ** 2 if is_known and isinstance(size, int) and isinstance(patch, int) else 0


def _draw_tokens(config: Any, num_images: int) -> torch.Tensor:  # noqa: ANN401 - transformers' own
    """Return [B, S] tokens, none of which has a special meaning, behind those of an image."""
    text = config.get_text_config()
    size = int(text.vocab_size)
    special: set[int] = set()
    for part in _configs(config):
        for key, value in vars(part).items():
            if _SPECIAL.fullmatch(key):
                special |= {item for item in (value if isinstance(value, list) else [value]) if type(item) is int}
    allowed = torch.tensor([token for token in range(size) if token not in special] or list(range(size)))
    length = min(SEQ_LEN, max_positions(text) or SEQ_LEN)
    tokens = allowed[torch.randint(0, len(allowed), (BATCH_SIZE, length))]
    if not num_images:
        return tokens
    image = torch.full((BATCH_SIZE, num_images), int(config.image_token_id))
    return torch.cat([tokens[:, :1], image, tokens[:, 1:]], dim=1)


def max_positions(text: Any) -> int | None:  # noqa: ANN401 - transformers' own
    """Return the longest sample of a text model; None where there is no limit (XLNet writes -1)."""
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _draw_pixels(config: Any, where: str, otherwise: str) -> torch.Tensor:  # noqa: ANN401 - transformers' own
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise UsageError("the config does not say how large an image is", where=where, hint=otherwise)
    return torch.randn(BATCH_SIZE, getattr(config, "num_channels", 3), *size)


def _draw_labels(title: str, config: Any, batch: Batch) -> torch.Tensor | None:  # noqa: ANN401 - transformers' own
    name = title.partition(" ")[0]
    num_labels = int(getattr(config, "num_labels", 2))
    if name.endswith(_LABELS_LIKE_INPUT) and "input_ids" in batch:
        return batch["input_ids"].clone()
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        if num_labels == 1:
            return torch.randn(BATCH_SIZE)
        return torch.randint(0, num_labels, (BATCH_SIZE,))
    if name.endswith("ForTokenClassification"):
        return torch.randint(0, num_labels, tuple(batch["input_ids"].shape))
    return None
