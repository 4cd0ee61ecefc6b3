"""Models that a config.json describes, built through transformers (extra `hf`). No code from a checkpoint is run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.models.config_recipe import FEEDS_ITSELF, LAYERDROP, USE_FACTORY, ConfigRecipe, nested
from ckpt_tools.models.recipe import BATCH_SIZE, SEQ_LEN, Batch
from ckpt_tools.models.replace_parameters import replace_parameters
from ckpt_tools.text import first_few

_SPECIAL = re.compile(r".*token(_id|_index|_ids)?(_.*)?|.*_(id|index)")
_LABELS_LIKE_INPUT = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")


class HfRecipe(ConfigRecipe):
    """A transformers model with the config of a checkpoint."""

    depth_keys = re.compile(
        r"(num_hidden_layers|num_layers|n_layers?|num_(decoder|encoder)_layers|(encoder|decoder)_layers|depth)"
    )

    def _find_class(self, otherwise: str) -> str:
        self._class, self._config_class = _find_classes(self._values, self.where, otherwise)
        name: str = self._class.__name__
        return name

    def _construct(self) -> nn.Module:
        config = self._config_class.from_dict(self.settled())
        for part in _configs(config):
            if hasattr(part, "use_cache"):
                part.use_cache = False
            self.turn_off(vars(part))
        model: nn.Module = self._class(config)
        _follow_device(model)
        return model

    def make_batch(self, model: nn.Module) -> Batch:
        """Draw what the class takes: tokens or pixels, and labels."""
        config: Any = model.config
        names = inspect.signature(type(model).forward).parameters
        otherwise = self._otherwise or USE_FACTORY
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
            what = f"ckpt cannot make a batch for a {self.title}, whose forward takes {takes}, …"
            raise UsageError(what, where=self.where, hint=self._otherwise or FEEDS_ITSELF)
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
        dropped = {key for part in nested(self._values) for key in part if LAYERDROP.fullmatch(key) and part[key]}
        if dropped and self.keeps_dropout:
            what = "ranks that skip different layers would wait for each other forever"
            notes.append(f"{first_few(sorted(dropped))} is off: under FSDP, {what}")
        return tuple(notes)

    def _cut_lists(self, part: dict[str, Any], depths: Mapping[str, int], num_layers: int) -> None:
        for key, value in part.items():
            if isinstance(value, list) and len(value) in depths.values():
                part[key] = value[:num_layers]


def _follow_device(model: nn.Module) -> None:
    """Move to meta what a class makes elsewhere when all is to be there: XLNet's legacy constructors ask nobody."""
    if torch.get_default_device().type == "meta":
        replace_parameters(model, lambda parameter: None if parameter.is_meta else parameter.detach().to("meta"))


def _find_classes(config: Mapping[str, Any], where: str, otherwise: str) -> tuple[Any, Any]:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError("the config names no architecture", where=where, hint=otherwise)
    refuse_older("transformers", f"building a {names[0]}")
    try:
        import transformers
    except ModuleNotFoundError as error:
        what = f"building a {names[0]} needs transformers"
        raise UsageError(what, where=where, hint=f"pip install 'ckpt-tools[hf]', or {otherwise}") from error
    found = getattr(transformers, names[0], None)
    # The name comes from a file: only a model class may be called.
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)) or found.config_class is None:
        custom = " (it has its own code, which ckpt does not run)" if "auto_map" in config else ""
        what = f"transformers {transformers.__version__} has no model class {names[0]}{custom}"
        raise UsageError(what, where=where, hint=otherwise)
    return found, found.config_class


def _configs(config: Any) -> Iterator[Any]:  # noqa: ANN401 - transformers' own
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            yield from _configs(part)


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
        raise UsageError("the config does not record the image size", where=where, hint=otherwise)
    return torch.randn(BATCH_SIZE, getattr(config, "num_channels", 3), *size)


def _draw_labels(title: str, config: Any, batch: Batch) -> torch.Tensor | None:  # noqa: ANN401 - transformers' own
    name = title.partition(" ")[0]
    num_labels = int(getattr(config, "num_labels", 2))
    if name.endswith(_LABELS_LIKE_INPUT) and "input_ids" in batch:
        labels: torch.Tensor = batch["input_ids"].clone()
        return labels
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        if num_labels == 1:
            return torch.randn(BATCH_SIZE)
        return torch.randint(0, num_labels, (BATCH_SIZE,))
    if name.endswith("ForTokenClassification"):
        return torch.randint(0, num_labels, tuple(batch["input_ids"].shape))
    return None
