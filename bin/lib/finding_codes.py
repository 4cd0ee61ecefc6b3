"""Every code of a finding or an error that the package's source can give, read from the source.

A code is the first argument of `Finding`, of its makers, or of a function that hands its `code` on to one of them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ckpt_tools"
_CODE = re.compile(r"[a-z]+(-[a-z0-9]+|-\*)*|\*-[a-z]+")
_MAKERS = {"error", "warning", "info"}
Handing = tuple[int, int | None, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file: its tree, and its constants by name."""

    path: str
    tree: ast.Module
    constants: dict[str, ast.expr]


@cache
def modules() -> list[Module]:
    """The package's files."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = [each for each in tree.body if isinstance(each, ast.Assign | ast.AnnAssign) and each.value]
        names = {ast.unparse(target): each.value for each in assigned for target in _targets(each)}
        found.append(Module(path.relative_to(PACKAGE).as_posix(), tree, names))  # type: ignore[arg-type]
    return found


def finding_codes() -> dict[str, set[str]]:
    """Code → the severities that it is given with; a part that is computed is `*`."""
    every = modules()
    shared = {name: value for each in every for name, value in each.constants.items() if name.isupper()}
    handing = _handing_on(every)
    found: dict[str, set[str]] = defaultdict(set)
    for module in every:
        for call, inside in _calls(module.tree):
            for code, severity in _codes_of(call, inside, shared | module.constants, handing, module.path):
                found[code] |= severity
    return dict(found)


def error_codes() -> dict[str, int]:
    """Code of an error → the exit code, its own or that of the class above it."""
    kinds = {
        node.name: node
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Interrupted"))
    }
    found = {}
    for name, kind in kinds.items():
        lineage = [name]
        fields: dict[str, object] = {}
        for each in lineage:
            lineage += [ast.unparse(base) for base in kinds[each].bases if ast.unparse(base) in kinds]
            fields = _fields(kinds[each]) | fields
        code, own = fields.get("code"), _fields(kind).get("code")
        if "CkptError" in lineage and isinstance(code, str) and own == code:
            found[code] = int(str(fields["exit_code"]))
    return found


def _fields(kind: ast.ClassDef) -> dict[str, object]:
    assigned = [each for each in kind.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    constants = [(target, each.value) for each in assigned for target in _targets(each)]
    return {ast.unparse(target): value.value for target, value in constants if isinstance(value, ast.Constant)}


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, Function | None]]:
    """Every call, and the function that it is in."""
    left: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while left:
        node, inside = left.pop()
        if isinstance(node, ast.Call):
            yield node, inside
        inner = node if isinstance(node, Function) else inside
        left += [(child, inner) for child in ast.iter_child_nodes(node)]


def _name(node: ast.expr) -> str:
    """The last part of what is called; unparsing every call of the package would take a minute."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _maker(call: ast.Call) -> bool:
    is_one = isinstance(call.func, ast.Attribute) and call.func.attr in _MAKERS and _name(call.func.value) == "Finding"
    return is_one or (isinstance(call.func, ast.Name) and call.func.id == "Finding")


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    named = next((each.value for each in call.keywords if each.arg == name), None)
    return named or (call.args[place] if len(call.args) > place else None)


def _handing_on(every: list[Module]) -> dict[str, Handing]:
    """Function that hands its `code` on → places of code and severity, and the severity that it has by itself."""
    found: dict[str, Handing] = {}
    for module in every:
        for call, inside in _calls(module.tree):
            code = _argument(call, 0, "code") if _maker(call) else None
            if inside is None or not isinstance(code, ast.Name):
                continue
            names = [each.arg for each in (*inside.args.posonlyargs, *inside.args.args) if each.arg != "self"]
            if code.id in names:
                is_method = inside.args.args[:1] != [] and inside.args.args[0].arg == "self"
                room = module.path.split("/")[0] if is_method else module.path
                is_shared = not is_method and not inside.name.startswith("_")
                key = inside.name if is_shared else f"{room}:{inside.name}"
                severity = names.index("severity") if "severity" in names else None
                own = call.func.attr if isinstance(call.func, ast.Attribute) else ""
                if not own and len(inside.args.defaults) >= len(names) - (severity or 0):
                    own = "error"
                found[key] = (names.index(code.id), severity, own)
    return found


def _codes_of(
    call: ast.Call,
    inside: Function | None,
    constants: dict[str, ast.expr],
    handing: dict[str, Handing],
    path: str,
) -> Iterator[tuple[str, set[str]]]:
    name = _name(call.func)
    code: ast.expr | None
    own: set[str]
    if makers := _alias(call, inside):
        code, own = call.args[0], makers
    elif name == "replace" and any(each.arg == "code" for each in call.keywords):
        code, own = _argument(call, 1, "code"), {"error"}
    elif _maker(call):
        code, severity = _argument(call, 0, "code"), _argument(call, 1, "severity")
        own = {name} if name in _MAKERS else _texts(severity, inside, constants)
    elif name == "partialmethod" and _find(handing, ast.unparse(call.args[0]), path):
        code, own = call.args[1], _texts(call.args[2], inside, constants)
    elif (where := _find(handing, name, path)) is not None:
        code = _argument(call, where[0], "code")
        given = None if where[1] is None else _argument(call, where[1], "severity")
        if given is None and where[1] is not None and not where[2]:
            return  # of the same name, and does something else
        own = _texts(given, inside, constants) if given is not None else {where[2]}
    else:
        return
    for text in _texts(code, inside, constants):
        if _CODE.fullmatch(text):
            yield text, own & {*_MAKERS}


def _find(handing: dict[str, Handing], name: str, path: str) -> Handing | None:
    """A function of any module, one of this module alone, or a method that is called in its room."""
    room = path.partition("/")[0]
    return handing.get(name) or handing.get(f"{path}:{name}") or handing.get(f"{room}:{name}")


def _alias(call: ast.Call, inside: Function | None) -> set[str]:
    """The severities of `make(…)`, where `make` is bound to makers of findings."""
    return _aliases(inside).get(_name(call.func), set()) if inside is not None and call.args else set()


@cache
def _aliases(inside: Function) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(inside):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            makers = [each for each in parts if isinstance(each, ast.Attribute) and _name(each.value) == "Finding"]
            found[node.targets[0].id] |= {each.attr for each in makers}
    return found


def _texts(node: ast.expr | None, inside: Function | None, constants: dict[str, ast.expr], depth: int = 0) -> set[str]:
    """Every text that an expression may be, as far as its function and the constants tell."""
    if node is None or depth > 4:
        return set()
    match node:
        case ast.Constant(value=str(text)):
            return {text} if text else set()
        case ast.JoinedStr():
            return {"".join(str(each.value) if isinstance(each, ast.Constant) else "*" for each in node.values)}
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.BoolOp():
            parts = node.values
        case ast.Name(id=name):
            parts = _bound(name, inside, constants) or [each for each in [constants.get(name)] if each is not None]
        case ast.Call(func=ast.Attribute(value=value, attr="get"), args=arguments):
            parts = [value, *arguments[1:]]
        case ast.Subscript():
            parts = [node.value]
        case ast.Dict():
            parts = node.values
        case _:
            parts = []
    return set().union(*(_texts(each, inside, constants, depth + 1) for each in parts))


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _bound(name: str, inside: Function | None, constants: dict[str, ast.expr] | None = None) -> list[ast.expr]:
    """What a name of a function is bound to: in assignments, also of tuples, and in loops over tuples."""
    found: list[ast.expr] = []
    for node in ast.walk(inside) if inside is not None else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in _targets(node):
                found += _matching(name, target, [node.value])
        elif isinstance(node, ast.For | ast.comprehension):
            found += _matching(name, node.target, _items(node.iter, inside, constants))
    return found


def _matching(name: str, target: ast.expr, values: list[ast.expr]) -> list[ast.expr]:
    if isinstance(target, ast.Name):
        return values if target.id == name else []
    if not isinstance(target, ast.Tuple):
        return []
    tuples = [each for each in values if isinstance(each, ast.Tuple) and len(each.elts) == len(target.elts)]
    return [
        one for i, part in enumerate(target.elts) for one in _matching(name, part, [each.elts[i] for each in tuples])
    ]


def _items(node: ast.expr, inside: Function | None, constants: dict[str, ast.expr] | None) -> list[ast.expr]:
    """The members of what a loop goes over, where it is written out."""
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    if isinstance(node, ast.ListComp):
        return [node.elt]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        table = (constants or {}).get(ast.unparse(node.func.value))
        pairs = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
        return [ast.Tuple(elts=[key, value]) for key, value in pairs if key is not None]
    if not isinstance(node, ast.Name) or inside is None:
        return []
    found: list[ast.expr] = []
    for each in ast.walk(inside):
        if isinstance(each, ast.Assign | ast.AugAssign) and any(ast.unparse(t) == node.id for t in _targets(each)):
            found += _items(each.value, None, None)
    return found
