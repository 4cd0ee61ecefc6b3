"""`--tp-plan auto`: rules from the tensor-parallel plan that comes with a model's architecture.

A plan maps modules, and sometimes parameters, to styles, with `*` for layer numbers: "layers.*.mlp.up_proj":
"colwise". Transformers knows the plan of an architecture; without transformers a built-in table serves
Llama-like models.

Source: `_get_parameter_plan` and `init_parallel_plans` in transformers 5.23 (`distributed/parallel_utils.py`,
`distributed/mixin.py`): a parameter's own entry comes before its module's, and the input embedding is cut
along the vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.errors import UsageError
from ckpt_tools.sandbox.audit import demand_sandbox
from ckpt_tools.sandbox.check_config import check_config, without_code_keys
from ckpt_tools.sandbox.child import Child, Here, build_in_sandbox
from ckpt_tools.transfer.placement.rule import STYLES, Rule

# The tensor-parallel plan of a model, found by transformers in a child in the sandbox. No torch here

RESOLVE = "ckpt_tools.transfer.placement.tp_plan:resolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the child is asked."""

    config: Mapping[str, object]
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it says."""

    plan: TpPlan | None


def auto_plan(config: Mapping[str, object], directory: str) -> TpPlan | None:
    """Return the plan that transformers has for the model of a config.json, None where it is not installed."""
    check_config(config, directory)
    check_quantization(config)
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    job = Question(config=config, directory=directory)
    with Child(RESOLVE, job, Answer, does="finds the tensor-parallel plan", sandboxed=True) as child:
        return child.result().plan


def resolve(job: Question, here: Here) -> Answer:
    """Find the plan; what `auto_plan` calls in a child."""
    named = job.config.get("architectures")
    subject = f"a {named[0]}" if isinstance(named, list) and named else "the model"
    import_model_class(job.config)
    build_in_sandbox(here, subject=subject, where=job.directory, foreign=(job.directory,))
    return Answer(plan=find_tp_plan(job.config))


_ORIGIN = "--tp-plan auto"
_WRITE_RULES = "write the rules yourself: --rules FILE, or --set 'GLOB=tp:S(0)'"

_OTHER_NAMES = f"the plan uses the names of the live model, but these tensors have others: {_WRITE_RULES}"

_LLAMA = {
    "lm_head": "colwise_gather_output",
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # Model types that the built-in table serves
_SAFE_QUANTIZATION = ("fp8",)
"""Quantisations that keep the dims of a weight; others pack or transpose them, and a plan would cut amiss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpPlan:
    """The plan of one architecture."""

    title: str
    styles: Mapping[str, str]
    """Module or parameter (with `*`) → style; only what the model has."""
    may_lack: frozenset[str]
    """Keys whose parameters a checkpoint leaves out because they are tied to others."""
    base_prefix: str
    """What the names of the bare model lack, with its dot ("model."); "" when this is the bare model."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter → its shape in the live model, of what the styles are about; empty where no model was built."""


def tp_plan_rules(config: Mapping[str, object], fqns: Collection[str], found: TpPlan | None) -> tuple[Rule, ...]:
    """Return the rules of the plan for the model that `config` describes, in the checkpoint's own names.

    A checkpoint of the bare model lacks the prefix that the full model has ("layers…" for "model.layers…"), and a
    trainer may have put another root before it; both are recognised by the names. Entries whose parameters the
    architecture does not have are dropped; a head that is tied to the embedding may be absent. Any other entry that
    matches nothing is an error when the rules are applied.

    The plan is what `find_tp_plan` has found; None takes the built-in one.
    """
    check_quantization(config)
    plan = found or _built_in_plan(config)
    prefix, root = _find_root(plan, fqns)
    origin = f"{_ORIGIN} ({plan.title})"
    shapes = {root + name.removeprefix(prefix): shape for name, shape in plan.shapes.items() if name.startswith(prefix)}
    rules = []
    # A parameter's own entry is longer than its module's, and comes first.
    for key in sorted(_keys(plan, prefix), key=lambda key: -key.count(".")):
        match = root + key.removeprefix(prefix)
        try:
            style = plan.styles[key]
            rule = Rule(match=match, style=style, origin=origin, hint=_OTHER_NAMES, shapes=shapes, is_live=True)
        except UsageError as error:
            raise UsageError(error.what, where=error.where, hint=_WRITE_RULES) from error
        # What stays whole is a rule, too: that of a parameter comes before the one that cuts the rest of its module.
        rules.append(replace(rule, optional=not rule.axes or key in plan.may_lack))
    return tuple(rules)


def _no_plan(what: str, architecture: str | None = None) -> UsageError:
    where = f"{_ORIGIN} ({architecture})" if architecture is not None else _ORIGIN
    return UsageError(what, where=where, hint=_WRITE_RULES)


def check_quantization(config: Mapping[str, object]) -> None:
    """Refuse a model whose weights are packed: a plan would cut other dims than it means."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in _SAFE_QUANTIZATION:
        raise _no_plan(f"the model is quantised ({method!r}), which changes the dims that its plan would cut")


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise _no_plan("config.json does not name an architecture")
    return names[0]


def import_model_class(config: Mapping[str, object]) -> None:
    """Import what the model of a config is built with, where it is installed; before the sandbox is entered.

    Libraries do as they like when they are imported: PyTorch's builds for GPUs start ldconfig to find CUDA.
    """
    with contextlib.suppress(Exception):  # what is missing or broken is an error of `find_tp_plan`
        import torch  # noqa: F401 - for what its import does
        import transformers

        getattr(transformers, _architecture(config), None)


def find_tp_plan(config: Mapping[str, object]) -> TpPlan | None:
    """Return the plan as transformers resolves it, None without transformers; in the sandbox only.

    The model is built on torch's meta device: names and plan, no weights. That takes into account what the
    class attributes alone do not show: nested models, the embedding, tied weights.
    """
    demand_sandbox()
    check_config(config, "config.json")
    try:
        import torch
        import transformers
    except ModuleNotFoundError:
        return None
    architecture = _architecture(config)
    model_class = getattr(transformers, architecture, None)
    # The name comes from a file: only a model class may be called.
    config_class = getattr(model_class, "config_class", None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if model_class is None or config_class is None or not is_model:
        raise _no_plan(f"transformers {transformers.__version__} has no model class {architecture}", architecture)
    values = {key: value for key, value in without_code_keys(config).items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            model = model_class(config_class.from_dict(values))
    except Exception as error:  # every model validates its config in its own way
        what = f"config.json does not describe a {architecture}: {type(error).__name__}: {error}"
        raise _no_plan(what, architecture) from error
    styles = dict(model.tp_plan or {})
    parameters = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    is_bare = model.base_model is model
    return _plan(architecture, styles, parameters, tied, "" if is_bare else f"{model.base_model_prefix}.")


def _plan(
    title: str,
    styles: Mapping[str, str],
    parameters: Mapping[str, tuple[int, ...]],
    tied: Collection[str],
    base_prefix: str,
) -> TpPlan:
    owned = {key: [name for name in parameters if _key_pattern(key).fullmatch(name)] for key in styles}
    present = {key: style for key, style in styles.items() if owned[key]}
    if not any(STYLES.get(style) != "whole" for style in present.values()):
        raise _no_plan(f"transformers has no tensor-parallel plan for {title}")
    may_lack = frozenset(key for key in present if all(name in tied for name in owned[key]))
    shapes = {name: parameters[name] for key in present for name in owned[key]}
    return TpPlan(title=title, styles=present, may_lack=may_lack, base_prefix=base_prefix, shapes=shapes)


def _built_in_plan(config: Mapping[str, object]) -> TpPlan:
    model_type = config.get("model_type")
    architecture = _architecture(config)
    if model_type not in LLAMA_FAMILY or not architecture.endswith("ForCausalLM"):
        hint = f"install the plans: pip install 'ckpt-tools[hf]'; or {_WRITE_RULES}"
        raise UsageError(f"no tensor-parallel plan is built in for {architecture}", where=_ORIGIN, hint=hint)
    may_lack = frozenset({"lm_head"} if config.get("tie_word_embeddings") else ())
    return TpPlan(title=architecture, styles=_LLAMA, may_lack=may_lack, base_prefix="model.")


def _key_pattern(key: str, root: str = "") -> re.Pattern[str]:
    """Return the pattern of a key's parameters: `*` is a number, and a parameter's own name may follow."""
    body = r"\.".join(r"\d+" if part == "*" else re.escape(part) for part in key.split("."))
    return re.compile(rf"{root}{body}(?:\.[^.]+)?")


def _keys(plan: TpPlan, prefix: str) -> list[str]:
    return [key for key in plan.styles if key.startswith(prefix)]


def _find_root(plan: TpPlan, fqns: Collection[str]) -> tuple[str, str]:
    """Return what the names of the plan have in front and the checkpoint's lack, and what these have instead.

    Keys of the plan that lack the former are left out. Of all roots that occur before a key's name the one that serves
    most keys is taken; without any, there is no plan.
    """
    best: tuple[int, str, str] = (0, "", "")
    for prefix in dict.fromkeys(("", plan.base_prefix)):
        served: dict[str, set[str]] = {}
        for key in _keys(plan, prefix):
            pattern = _key_pattern(key.removeprefix(prefix), root=r"(?P<root>(?:.*\.)?)")
            for match in map(pattern.fullmatch, fqns):
                if match is not None and not set("*?{}") & set(match["root"]):
                    served.setdefault(match["root"], set()).add(key)
        for root, found in sorted(served.items()):
            if len(found) > best[0]:
                best = (len(found), prefix, root)
    if not best[0]:
        examples = ", ".join(list(plan.styles)[:2])
        what = f"the checkpoint has none of the names of the plan, such as {examples}"
        raise UsageError(what, where=f"{_ORIGIN} ({plan.title})", hint=_OTHER_NAMES)
    return best[1:]
