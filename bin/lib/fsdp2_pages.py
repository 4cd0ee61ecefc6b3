"""docs/reference/fsdp2.md: signatures and docstrings of what `ckpt_tools.fsdp2` exports, by what it is for."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import api_pages

HEAD = """\
# Library reference: FSDP2

<!-- Written by bin/docs from signatures and docstrings. Do not edit. -->

What `import ckpt_tools.fsdp2` offers: pieces for your own training script, in the order in which a script uses them.
The import loads torch. The [guides](../guides/fsdp2-cookbook.md) show the pieces at work;
[diagnoses](diagnoses.md) explains the codes of findings.

**Stability.** The names on this page are [stable](stability.md): within a major version none is renamed or removed, and
keywords keep their meaning; new names, keywords and fields may be added. Modules below `ckpt_tools.fsdp2`, and names
that begin with `_`, may change at any time.
"""
SECTIONS = {
    "Mesh and policy": ("mesh", "policy", "sharding"),
    "Shard": ("train.frozen", "wrap", "blocks", "entry_methods"),
    "Load": ("load", "scatter", "buffers"),
    "Train": ("train", "optimizer.switch_optimizer", "optimizer.step_on_whole"),
    "Save and resume": ("save", "optimizer", "state"),
    "Adapters": ("lora",),
    "4-bit weights": ("qlora",),
    "Check and diagnose": ("audit", "compare_ranks", "watch", "diagnose", "catalogue", "internals", "local"),
}
"""Heading → modules, or single names of them. What is in none of them comes last."""
REST = "More"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Where a module states a name."""

    module: str
    line: int
    value: str
    """Of a constant: its code."""
    doc: str
    """Of a constant: the string below."""


def render() -> str:
    """The whole page; within a section the order is that of the modules, and of the code in them."""
    import ckpt_tools.fsdp2 as package

    stated = _statements(Path(package.__file__).parent)
    # Of the room above, and found here as well.
    above = _statements(Path(package.__file__).parents[1] / "preflight")["read_sharding"]
    stated["read_sharding"] = dataclasses.replace(above, module="sharding")
    sections: dict[str, list[tuple[int, int, str]]] = {heading: [] for heading in (*SECTIONS, REST)}
    for name in package.__all__:
        statement = stated[name]
        heading, place = _place(name, statement)
        sections[heading].append((place, statement.line, _describe(name, getattr(package, name), statement)))
    parts = [HEAD]
    for heading, members in sections.items():
        if members:
            parts += [f"## {heading}\n", *(text for *_, text in sorted(members))]
    return "\n".join(parts)


def _place(name: str, statement: Statement) -> tuple[str, int]:
    for wanted in (f"{statement.module}.{name}", statement.module):
        for heading, modules in SECTIONS.items():
            if wanted in modules:
                return heading, modules.index(wanted)
    return REST, 0


def _statements(package: Path) -> dict[str, Statement]:
    """Return the functions, classes and constants that the modules of a package state at their top level."""
    found = {}
    for path in sorted(package.glob("[!_]*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        docs = api_pages.docs_below(body)
        for node in body:
            value = ""
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            else:
                name = api_pages.assigned_name(node)
                value = ast.unparse(node).partition(" = ")[2] if name else ""
            found[name] = Statement(module=path.stem, line=node.lineno, value=value, doc=docs.get(name, ""))
    return found


def _constructor(name: str, kind: type) -> str:
    """How a class is called; empty where nobody makes one."""
    written = vars(kind).get("__init__")
    if written is None:
        return ""
    if not dataclasses.is_dataclass(kind):
        call = api_pages.signature(name, written).replace("(self, ", "(").replace("(self)", "()")
        return f"```python\n{call.removesuffix(' -> None')}\n```\n\n"
    parts = [f"{f.name}: {f.type}{api_pages.default_of(f)}".replace("'", '"') for f in dataclasses.fields(kind)]
    starred = ["*"] if all(f.kw_only for f in dataclasses.fields(kind)) else []
    return "\n".join(["```python", f"{name}(", *(f"    {part}," for part in (*starred, *parts)), ")", "```", "", ""])


def _describe(name: str, member: object, statement: Statement) -> str:
    if inspect.isfunction(member):
        return api_pages.function_entry(name, member)
    if inspect.isclass(member):
        return f"### {name}\n\n{_constructor(name, member)}{api_pages.describe_class(member)}\n"
    # As ruff writes it, which formats the Python in documents too.
    value = f"({json.dumps(member)[1:-1]})" if isinstance(member, tuple) else statement.value
    # A call says how the value is made, not what it is.
    code = "" if value.endswith(")") and not value.startswith("(") else f"```python\n{name} = {value}\n```\n\n"
    return f"### {name}\n\n{code}{statement.doc}\n"
