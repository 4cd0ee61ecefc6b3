"""What the installed transformers says of names, where the table of names is silent: asked in the sandbox."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckpt_tools.checkpoint.names.match_architecture import match_names
from ckpt_tools.checkpoint.names.patterns import add
from ckpt_tools.checkpoint.names.table import Expected, Tie, load_table
from ckpt_tools.checkpoint.names.transformers_renames import RenameRule
from ckpt_tools.errors import CkptError
from ckpt_tools.floors import installed_release
from ckpt_tools.sandbox.check_config import check_config
from ckpt_tools.sandbox.child import Child, Here, build_in_sandbox

_KINDS = {
    "WeightRenaming": "rename",
    "PrefixChange": "rename",
    "GroupWeightRename": "group",
    "WeightConverter": "convert",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesQuestion:
    """What the child is asked: the text of a config."""

    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesAnswer:
    """What it says; see `Expected`."""

    base: str
    names: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    rules: tuple[RenameRule, ...]
    save_rules: tuple[RenameRule, ...]
    ignored: tuple[str, ...]
    may_miss: tuple[str, ...]


def expected_for(architecture: str, config: Mapping[str, object], fits: Callable[[Expected], bool]) -> Expected | None:
    """Return what a model's tensors are called: by the table, or by transformers where its answer does not `fits`."""
    known = load_table().expected(architecture, config)
    if (known is not None and fits(known)) or not _has_class(architecture, str(config.get("model_type"))):
        return known
    asked, live = _ask(architecture, json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    if known is None or (asked is not None and (fits(asked) or not match_names(live, known, {}).is_whole)):
        return asked
    known.is_proven = asked is not None
    return known


def _has_class(architecture: str, model_type: str) -> bool:
    """Does the installed transformers define this class? Asking takes seconds, looking into its files does not."""
    spec, name = importlib.util.find_spec("transformers"), re.sub(r"\W", "_", model_type)
    files = [
        file
        for root in getattr(spec, "submodule_search_locations", None) or ()
        for file in Path(root, "models", name).glob("modeling_*.py")
    ]
    pattern = re.compile(rf"^class {re.escape(architecture)}\(", re.MULTILINE)
    return any(pattern.search(file.read_text(encoding="utf-8", errors="replace")) for file in files)


@lru_cache(maxsize=8)
def _ask(architecture: str, config: str) -> tuple[Expected | None, tuple[str, ...]]:
    """Return what the installed transformers says, with the live names; None where it does not know the model."""
    try:
        check_config(json.loads(config), "config.json")
        job = NamesQuestion(config=config)
        with Child(
            "ckpt_tools.models.ask_transformers:answer", job, NamesAnswer, does="asks transformers", sandboxed=True
        ) as child:
            found = child.result()
    except CkptError:
        return None, ()
    expected = Expected(
        architecture=architecture,
        base=found.base,
        ties=[Tie(target=re.escape(target), source=re.escape(source)) for target, source in found.ties],
        rules=list(found.rules),
        save_rules=list(found.save_rules),
        ignored=list(found.ignored),
        may_miss=list(found.may_miss),
        by=f"transformers {installed_release('transformers')}",
        is_proven=True,
    )
    for name in found.names:
        add(expected.names, name, required=True)
    return expected, found.names


def answer(job: NamesQuestion, here: Here) -> NamesAnswer:
    """Build the model on meta, and say what it is made of; what `_ask` calls in a child."""
    import torch
    from transformers import conversion_mapping

    from ckpt_tools.models.recipe_of import recipe_of

    recipe = recipe_of(json.loads(job.config), "config.json")
    build_in_sandbox(here, subject=recipe.title, where="config.json", foreign=())
    with torch.device("meta"):
        model: Any = recipe.build()
    mapping: Any = conversion_mapping
    transforms = mapping.get_model_conversion_mapping(model)
    legacy = [one.source_patterns for one in mapping.get_checkpoint_conversion_mapping("legacy") or ()]
    saved = [one for one in transforms if one.source_patterns not in legacy and type(one).__name__ != "PrefixChange"]
    rules = [rule_of(one) for one in transforms]
    save_rules = [rule_of(one.reverse_transform()) for one in reversed(saved)]
    if None in rules or None in save_rules:
        raise CkptError("transformers has a kind of renaming that ckpt does not know")
    return NamesAnswer(
        base=model.base_model_prefix or "",
        names=tuple(model.state_dict()),
        ties=tuple((model.all_tied_weights_keys or {}).items()),
        rules=tuple(filter(None, rules)),
        save_rules=tuple(filter(None, save_rules)),
        ignored=tuple(model._keys_to_ignore_on_load_unexpected or ()),  # noqa: SLF001 - by these it loads
        may_miss=tuple(model._keys_to_ignore_on_load_missing or ()),  # noqa: SLF001
    )


def rule_of(transform: Any) -> RenameRule | None:  # noqa: ANN401 - transformers' own WeightTransform
    """Return one of transformers' renamings or conversions as the table has it; None for a kind that it has not."""
    name = type(transform).__name__
    kind = f"shift{transform.offset:+d}" if name == "Inkling2IndexOffsetWeightRename" else _KINDS.get(name)
    if kind is None:
        return None
    return RenameRule(
        kind=kind,
        operations=",".join(map(_operation, getattr(transform, "operations", ()))),
        sources=tuple(transform.source_patterns),
        targets=tuple(transform.target_patterns),
        scope=transform.scope_prefix,
        base=transform.base_model_prefix or "",
    )


def _operation(operation: object) -> str:
    """Return an operation with what it is told: ``Chunk(dim=0)``."""
    told = []
    for name, value in vars(operation).items():
        if value is None or value is False or name.endswith("_op"):
            continue
        text = "|".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        told.append(f"{name}={text}")
    return type(operation).__name__ + (f"({';'.join(told)})" if told else "")
