"""What the installed PEFT makes of an adapter of a type that ckpt carries: asked in a sandboxed child, without data.

PEFT gives the base model its adapters on the meta device, and takes the names and shapes of the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.read.assemble import is_for_training, parse_key
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG
from ckpt_tools.errors import CkptError
from ckpt_tools.sandbox import check_config
from ckpt_tools.sandbox.child import Child, Here, build_behind_walls
from ckpt_tools.text import escape_name, first_few

if TYPE_CHECKING:
    from torch import nn

_SETTLED: Config = {"inference_mode": True, "prompt_tuning_init": "RANDOM"}
"""With other values PEFT reads what the configuration names: tokenizers, other adapters."""
_TRAINED = re.compile(r"\.default(?:\.|$)|\.modules_to_save\.")
_NAMED = re.compile(r"\.default(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the child is asked."""

    base: str
    """Text of the base's config.json."""
    config: str
    """Text of adapter_config.json."""
    shapes: Mapping[str, Shape]
    """Name in PEFT's file → shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What PEFT says."""

    refused: str = ""
    """On what it raises."""
    unknown: str = ""
    """What it does not tell without data."""
    missing: tuple[str, ...] = ()
    """Names in the model that the file has nothing for, and which PEFT begins anew."""
    ignored: tuple[str, ...] = ()
    """Names in the file that PEFT has no place for."""


def load(file: AdapterFile, config: Config, loading: Loading) -> None:
    """Ask PEFT; raise RejectedError where it raises."""
    for name in file.tensors:
        key = parse_key(name.removeprefix("base_model.model."))
        loading.use(name, (key.path if key is not None else "") or name.rpartition(".")[0] or "prompt_encoder")
    if file.base is None:
        loading.needs_base(file.file, "without --base PEFT cannot be asked what it loads")
        return
    if any(importlib.util.find_spec(name) is None for name in ("peft", "transformers", "torch")):
        loading.unchecked(file.file, "PEFT is not installed, which judges this type: pip install 'ckpt-tools[hf]'")
        return
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    plain = {key: value for key, value in file.base_config.items() if key != "quantization_config"}
    try:
        check_config(plain, "the base's config.json")
        job = Question(base=json.dumps(plain), config=json.dumps({**config}), shapes=shapes)
        with Child("ckpt_tools.adapters.ecosystems.peft.asked:answer", job, Answer, does="asks PEFT", walled=True) as c:
            found = c.result()
    except CkptError as error:
        loading.unchecked(file.file, f"PEFT could not be asked: {error.what}")
        return
    if found.refused:
        raise RejectedError(found.refused)
    if found.unknown:
        loading.unchecked(file.file, f"not known: {found.unknown}")
    for name in found.ignored:
        del loading.used[name]
        loading.ignored[name] = "PEFT has no place for it"
    if found.missing:
        loading.incomplete(
            ADAPTER_CONFIG,
            f"the file lacks {len(found.missing)} tensors that PEFT makes for this configuration "
            f"({first_few(found.missing)}): PEFT initialises them (a warning at most)",
            "is it the configuration of this adapter, and was it saved completely?",
        )


def answer(job: Question, here: Here) -> Answer:
    """Build the model on meta, and have PEFT load the names; what `load` calls in a child."""
    import peft  # noqa: F401 - before the sandbox closes
    import torch

    from ckpt_tools.models.recipe_of import recipe_of

    recipe = recipe_of(json.loads(job.base), "the base's config.json")
    build_behind_walls(here, subject=recipe.title, where="the base's config.json", foreign=())
    with torch.device("meta"):
        model = recipe.build()
    return judge(model, json.loads(job.config), job.shapes)


def judge(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Answer:
    """Return what PEFT says of an adapter for a model on the meta device, which it wraps."""
    import torch

    peft: Any = importlib.import_module("peft")
    settled = {name: value for name, value in _SETTLED.items() if name in config or name == "inference_mode"}
    try:
        with torch.device("meta"):
            own = peft.PeftConfig.from_peft_type(**{**config, **settled})
            wrapped = peft.get_peft_model(model, own)
            given = {name: torch.empty(tuple(shape)) for name, shape in shapes.items()}
        result = peft.set_peft_model_state_dict(wrapped, given)
    except NotImplementedError:
        return Answer(unknown="what PEFT makes of this adapter without the values of the weights")
    except Exception as error:  # noqa: BLE001 - whatever PEFT raises, it raises for the user, too
        return Answer(refused=f"{type(error).__name__}: {_first_line(error)}")
    if own.is_prompt_learning:
        return _judge_prompt(model, own, set(shapes))
    state = wrapped.state_dict(keep_vars=True)
    lacking = {name for name in result.missing_keys if not is_for_training(name)}
    there = {id(state[name]) for name in state if name not in lacking}  # what modules share has several names
    missing = [name for name in lacking if _TRAINED.search(name) and id(state.get(name)) not in there]
    ignored = {form for name in result.unexpected_keys for form in (name, _NAMED.sub("", name))}
    return Answer(missing=tuple(sorted(missing)), ignored=tuple(name for name in shapes if name in ignored))


def _judge_prompt(model: Any, own: Any, names: set[str]) -> Answer:  # noqa: ANN401 - PEFT's configuration
    """PEFT has loaded the embeddings; whether they are as wide as the model's shows when it runs."""
    if own.peft_type not in ("PROMPT_TUNING", "P_TUNING", "CPT"):
        return Answer(unknown=f"whether the tensors of {own.peft_type.value} fit the base's attention and tasks")
    width = model.get_input_embeddings().weight.shape[1]
    if own.token_dim != width:
        return Answer(refused=f"token_dim is {own.token_dim}, the base's embeddings have {width}")
    return Answer(ignored=tuple(sorted(names - {"prompt_embeddings"})))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return escape_name(lines[-1 if isinstance(error, RuntimeError) else 0])
