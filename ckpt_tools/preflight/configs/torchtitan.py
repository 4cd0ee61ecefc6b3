"""torchtitan's config: the JSON of `debug.save_config_file`, the function that a launch line names, or TOML.

Source: torchtitan 0.1 to 0.3: `config/configs.py` (`ParallelismConfig`, `TrainingConfig`), `parallel_dims.py`
(`ParallelDims._validate`: -1 is the rest; ep takes its ranks from dp_shard × cp × tp), `trainer.py`,
`components/checkpointer/`, `config/job_config.py` and `config_manager.py` of 2025; options of all of them are known.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.document import MAX_BYTES, Document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, TrainerReader, read_table
from ckpt_tools.preflight.configs.overrides import put, read_flags, started
from ckpt_tools.preflight.configs.schema import section
from ckpt_tools.preflight.spec import AdapterSpec, Engine, resolved, sharding_strategy
from ckpt_tools.storage.source import read_named_file

_SEQ_LEN = 2048  # as in `fields.tsv`


_OPTIONS = section("torchtitan")


def _adapter(given: Given) -> AdapterSpec | None:
    """Return the adapter: `LoRAConverter` alone of the converters has a rank."""
    for one in given.raw.model_spec.converters:
        if one.rank is not None:
            return AdapterSpec(rank=one.rank, alpha=one.alpha, targets=one.target_modules or ())
    return None


def _engine(given: Given) -> Engine:
    """Return the engine: `fully_shard` even over one rank, for its dtypes, except under plain replicas."""
    spec = given.spec
    if spec.world_size == 1:
        return "none"
    only_replicas = resolved(spec, "dp_shard") == 1 and all(spec.axes[name] == 1 for name in ("cp", "tp", "pp"))
    return "ddp" if only_replicas and spec.axes["dp_replicate"] > 1 else "fsdp2"


def _strategy(given: Given) -> tuple[str, bool]:
    policy, spec = given.raw.parallelism.fsdp_reshard_after_forward or "default", given.spec
    # A pipeline's microbatches would gather the parameters again and again: "default" keeps them then.
    reshards = {"always": True, "never": False}.get(policy, spec.axes["pp"] == 1)
    return sharding_strategy(spec, reshards=reshards), reshards


_SELECTIONS = {"SelectiveAC": "op", "MemoryBudgetAC": "memory_budget"}


def _checkpointing(given: Given) -> tuple[bool, str | None]:
    """Return whether blocks run again whole, or which selection does: of operations since 0.3, else every second."""
    section = given.raw.activation_checkpoint
    is_default = "activation_checkpoint" not in given.raw.model_fields_set
    if section.kind is not None:
        return section.kind == "FullAC", _SELECTIONS.get(section.kind)
    if section.mode is None and (not is_default or "model_spec" in given.raw.model_fields_set):
        if section.memory_budget is not None:
            return False, "memory_budget"
        if section.force_recompute_mm_shapes_by_fqns is not None or is_default:
            return False, "op"
        return section.preserve_rng_state is not None, None
    if section.mode in (None, "selective"):
        return False, section.selective_ac_option or "2"
    return section.mode == "full", "memory_budget" if section.mode == "memory_budget" else None


def _optimizer(given: Given) -> str:
    """Return the optimizer; where groups have several, that of the last, which takes what the others leave."""
    section = given.raw.optimizer
    names = [group.optimizer_name for group in section.param_groups if group.optimizer_name is not None]
    return section.name or (names[-1] if names else "") or "AdamW"


def _batch_size(given: Given) -> object:
    """Return the samples of a step; newer versions count tokens, and a sample is as long as the context."""
    training = given.raw.training
    tokens = training.num_tokens_per_microbatch_per_dp_rank
    if tokens is not None:
        return max(1, tokens // max(1, training.max_context_length or _SEQ_LEN))
    return training.local_batch_size or training.batch_size or 8


_TABLE = read_table(
    "torchtitan",
    engine=_engine,
    strategy=_strategy,
    checkpointing=_checkpointing,
    adapter=_adapter,
    optimizer=_optimizer,
    batch_size=_batch_size,
)


def _program(command: Sequence[str], at: int) -> int:
    return int(command[at] == "torchtitan.train" or command[at].endswith(("torchtitan/train.py", "run_train.sh")))


def _looks_like(document: Document) -> bool:
    if document.values is None:
        words = started(document.commands, _program) or ()
        return any(word.partition("=")[0] == "--module" for word in words)
    values = document.values
    degrees = values.get("parallelism")
    if isinstance(degrees, Mapping) and any(str(key).endswith("_degree") for key in degrees):
        return True
    telling = ("job", "parallelism", "metrics", "lr_scheduler", "activation_checkpoint", "comm")
    return isinstance(values.get("training"), Mapping) and any(
        isinstance(values.get(name), Mapping) for name in telling
    )


def _prepare(document: Document) -> ReaderInput:
    words = started(document.commands, _program)
    if words is None or document.values is not None:
        return ReaderInput(model=_OPTIONS, table=_TABLE, values=document.keyed())
    options, unread = read_flags(words)
    values, named, findings = _registered(options, document)
    for path, value in options.items():
        *parents, last = path.split(".")
        is_off = last.startswith("no_") and value is True
        put(values, [*parents, last.removeprefix("no_") if is_off else last], False if is_off else value)
    words = (*unread, *named)
    return ReaderInput(model=_OPTIONS, table=_TABLE, values=values, words=words, findings=findings, spell="--{}".format)


def _registered(
    options: dict[str, object], document: Document
) -> tuple[dict[str, object], tuple[str, ...], tuple[Finding, ...]]:
    """Return the config that a launch line names; else the words that name it, and why it was not read."""
    module, name, file = (options.pop(key, None) for key in ("module", "config", "job.config_file"))
    if not isinstance(module, str) or not isinstance(name, str):
        return {}, (f"--job.config_file {file}" if file else "--module and --config of torchtitan.train",), ()
    try:
        return dict(read_function(find_registry(module, document), name)), (), ()
    except NotCertainError as error:
        hint = "run it once with --debug.save_config_file config.json, and check that file"
        found = Finding.info("unread-options", f"--config {name}", str(error), hint)
        return {}, (f"--module {module} --config {name}",), (found,)


READER = TrainerReader(name="torchtitan", looks_like=_looks_like, prepare=_prepare)


# A function of torchtitan's `config_registry.py` → the tree that it returns, read and never run
# Certain are calls of config classes with keywords, plain values, other functions of the same file without arguments,
# and attributes that are assigned afterwards. Every other expression stays what is written, as `${…}`: not in the file.
# A function with a branch or a loop is not read at all.
# Source: torchtitan 0.3: `config/manager.py:_load_config` (how `--module` and `--config` name a function),
# `models/*/config_registry.py`, `distributed/activation_checkpoint.py`, `components/optimizer/optimizer.py`.

_NAMED = ("AC", "Converter")  # ends of classes that differ in more than their fields: their name is kept, as `class`
_OPTIMIZERS = {"default_adamw": "AdamW", "default_adam": "Adam", "default_muon": "Muon"}
_PACKAGES = ("torchtitan.models", "torchtitan.experiments", "torchtitan.experiments.rl.examples", "")
"""Where `--module` is looked for, in this order."""
_MAX_CALLS = 8
_MAX_PARENTS = 4


class NotCertainError(Exception):
    """What a function returns cannot be told without running it."""


def find_registry(module: str, document: Document) -> str:
    """Return the file that `--module` names, around the script or installed, or raise NotCertainError."""
    folder = os.path.dirname(os.path.abspath(document.path))
    roots = [os.getcwd(), *(os.path.join(folder, *[".."] * up) for up in range(_MAX_PARENTS))]
    try:
        spec = find_spec("torchtitan")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin:
        roots.append(os.path.dirname(os.path.dirname(spec.origin)))
    names = [f"{package}.{module}".strip(".").replace(".", os.sep) for package in _PACKAGES]
    places = (
        os.path.join(root, *parts)
        for root in roots
        for name in names
        for parts in ((name, "config_registry.py"), (f"{name}.py",))
    )
    for place in places:
        if "\0" not in place and os.path.isfile(place):
            return place
    raise NotCertainError(f"the config_registry.py of {module} is not on this machine")


def read_function(path: str, name: str) -> Mapping[str, object]:
    """Return the tree of a function's config; raise NotCertainError if it depends on more than what is written."""
    try:
        tree = ast.parse(read_named_file(path, what="the registry", max_bytes=MAX_BYTES))
    except (CkptError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotCertainError(f"{path} is not valid Python") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = _call(name, functions, 0)
    if not isinstance(found, dict):
        raise NotCertainError(f"{name} in {path} returns a value that is not defined there")
    return found


def _call(name: str, functions: Mapping[str, ast.FunctionDef], depth: int) -> object:
    node = functions.get(name)
    if node is None or node.decorator_list or depth > _MAX_CALLS:
        raise NotCertainError(f"there is no plain function {name}")
    values: dict[str, object] = {}
    for line in node.body:
        if isinstance(line, ast.Return) and line.value is not None:
            _check_calls(line.value, values)
            return _value(line.value, values, functions, depth)
        if isinstance(line, (ast.Expr, ast.Assert, ast.Import, ast.ImportFrom)):
            if isinstance(line, ast.Expr) and not isinstance(line.value, ast.Constant):
                raise NotCertainError(f"{name} calls {ast.unparse(line)[:60]}, which may change the config")
        elif isinstance(line, ast.FunctionDef):
            values[line.name] = f"${{{line.name}}}"
        elif isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value is not None:
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            _check_calls(line.value, values)
            for target in targets:
                _assign(ast.unparse(target).split("."), _value(line.value, values, functions, depth), values)
        else:
            raise NotCertainError(f"{name} has a line that is not certain: {ast.unparse(line)[:60]}")
    raise NotCertainError(f"{name} returns nothing")


def _check_calls(node: ast.expr, values: Mapping[str, object]) -> None:
    """Stop at an expression that hands a config on: whoever gets it may change it."""
    for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
        given = (values.get(arg.id) for arg in call.args if isinstance(arg, ast.Name))
        if any(isinstance(value, dict) and "flavor" not in value for value in given):
            raise NotCertainError(f"{ast.unparse(call)[:60]} may change the config")


def _assign(parts: Sequence[str], value: object, values: dict[str, object]) -> None:
    """Set a variable or an attribute; what lies below an expression that stays unread is not known either way."""
    if all(part.isidentifier() for part in parts):
        put(values, list(parts), value)
    else:
        raise NotCertainError(f"{'.'.join(parts)[:60]} is assigned")


def _value(
    node: ast.expr, values: Mapping[str, object], functions: Mapping[str, ast.FunctionDef], depth: int
) -> object:
    """Return the value of an expression; one that is not certain as `${…}`."""
    if isinstance(node, ast.Call) and not node.args and all(word.arg for word in node.keywords):
        called = ast.unparse(node.func)
        if called in functions and not node.keywords:
            return _call(called, functions, depth + 1)
        kind, _, last = called.rpartition(".")
        given = {str(word.arg): _value(word.value, values, functions, depth) for word in node.keywords}
        if called in _OPTIMIZERS:
            return {"param_groups": [{"optimizer_name": _OPTIMIZERS[called], "optimizer_kwargs": given}]}
        if last == "Config" or (not kind and last.endswith("Config")):
            name = kind.rpartition(".")[2]
            return {"class": name, **given} if name.endswith(_NAMED) else given
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "model_registry" and len(node.args) == 1:
        given = {str(word.arg): _value(word.value, values, functions, depth) for word in node.keywords}
        return {"flavor": _value(node.args[0], values, functions, depth), **given}
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, values, functions, depth) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return f"${{{ast.unparse(node)}}}"
