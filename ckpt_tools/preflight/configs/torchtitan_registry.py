"""A function of torchtitan's `config_registry.py` → the tree that it returns, read and never run.

Certain are calls of config classes with keywords, plain values, other functions of the same file without arguments, and
attributes that are assigned afterwards. Every other expression stays what is written, as `${…}`: not in the file. A
function with a branch or a loop is not read at all.

Source: torchtitan 0.3: `config/manager.py:_load_config` (how `--module` and `--config` name a function),
`models/*/config_registry.py`, `distributed/activation_checkpoint.py`, `components/optimizer/optimizer.py`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.document import MAX_BYTES, Document
from ckpt_tools.preflight.configs.hydra import put
from ckpt_tools.storage.named_file import read_named_file

_NAMED = ("AC", "Converter")
"""Ends of classes that differ in more than their fields: their name is kept, as `class`."""
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
        raise NotCertainError(f"{path} is not Python that can be read") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = _call(name, functions, 0)
    if not isinstance(found, dict):
        raise NotCertainError(f"{name} in {path} returns what is not written there")
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
