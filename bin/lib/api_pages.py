"""docs/reference/api.md: signatures and docstrings of what `ckpt_tools` exports."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable

HEAD = """\
# Library reference

<!-- Written by bin/docs from signatures and docstrings. Do not edit. -->

What `import ckpt_tools` offers, without importing torch. The functions have the names and defaults of the
[command line](cli.md), which is a thin layer over them.
"""
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Source|Note|Example):")
_ARGUMENT = re.compile(r"^- `(?!\w+Error`)\w+`: .*\n(?:  .*\n)*", re.MULTILINE)
SHARED = 2
"""An argument that so many functions have in the same words is described apart; errors stay where they are raised."""
_ENTRY = re.compile(r"(\*{0,2}\w[\w.]*): (.*)")
WIDTH = 100


HOOKS = """## Hooks

`ckpt_tools.hooks` manages the checkpoints of a run from inside ([guide](../guides/tending.md)). `TrainerTending` is the
callback of transformers' Trainer and `LightningTending` that of Lightning: both take the settings of `Tending`.
"""


def describe(docstring: str | None) -> str:
    """A Google docstring as Markdown: sections become headings, their entries a list."""
    parts: list[str] = []
    in_section = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        section = _SECTION.fullmatch(line)
        entry = _ENTRY.fullmatch(line.strip())
        if section:
            in_section = True
            parts += [f"**{section[1]}**", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     ") and entry:
            text = f"- `{entry[1]}`: {entry[2]}"
            parts += textwrap.wrap(text, 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        elif in_section and line.startswith("     "):
            parts.append(f"  {line.strip()}")
        else:
            parts.append(line.strip() if in_section else line)
    return "\n".join(parts)


def type_text(annotation: object) -> str:
    """An annotation as one would write it: it is text in most modules, and a type where options are stated."""
    if isinstance(annotation, str):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, typing.get_args(annotation)))
    text = "None" if annotation is types.NoneType else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:collections\.abc|typing|ckpt_tools(?:\.\w+)+)\.", "", text)


def signature(name: str, function: Callable[..., object]) -> str:
    """`def name(…)` as one would write it, on one line or on one per parameter."""
    found = inspect.signature(function)
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        is_typed = parameter.annotation is not parameter.empty
        typed = f"{parameter.name}: {type_text(parameter.annotation)}" if is_typed else parameter.name
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(typed + default)
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    short = f"{name}({', '.join(parts)}){returns}"
    if len(short) <= WIDTH:
        return short
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def assigned_name(node: ast.stmt) -> str:
    """What an assignment to one plain name is called; empty for other statements."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign):
        target = node.target
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def docs_below(body: list[ast.stmt]) -> dict[str, str]:
    """The string under each assignment, by name."""
    docs = {}
    for statement, following in itertools.pairwise(body):
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            continue
        if name := assigned_name(statement):
            docs[name] = inspect.cleandoc(str(following.value.value)).replace("\n", " ")
    return docs


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    return docs_below(ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body)  # type: ignore[attr-defined]


def function_entry(name: str, function: Callable[..., object]) -> str:
    """A function under a heading of its own."""
    return f"### {name}\n\n```python\ndef {signature(name, function)}\n```\n\n{describe(function.__doc__)}\n"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {getattr(field.default_factory, '__name__', '…')}()"
    return "" if field.default is dataclasses.MISSING else f" = {field.default!r}"


def describe_class(kind: type) -> str:
    """A class: what it is, its fields, its own public methods and properties."""
    parts = [describe(kind.__doc__)]
    rows = []
    if dataclasses.is_dataclass(kind):
        docs = field_docs(kind)
        rows += [
            f"- `{f.name}: {f.type}{_default(f)}`" + (f": {docs[f.name]}" if f.name in docs else "")
            for f in dataclasses.fields(kind)
        ]
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        call = signature(name, function).replace("(self, ", "(").replace("(self)", "()") if function is member else name
        rows.append(f"- `{call}`: {inspect.cleandoc(function.__doc__).splitlines()[0]}")
    return "\n\n".join([*parts, "\n".join(rows)]) if rows else parts[0]


def with_shared(entries: dict[str, str]) -> tuple[list[str], str]:
    """Functions whose arguments of many are only named, and the list of these; by text, so that both say the same."""
    count = Counter(argument for text in entries.values() for argument in _ARGUMENT.findall(text))
    shared = {
        argument: name
        for argument, number in count.items()
        if number >= SHARED
        for name in [argument[3:].split("`")[0]]
    }
    texts = []
    for text in entries.values():
        known = [f"`{shared[each]}`" for each in _ARGUMENT.findall(text) if each in shared]
        rest = _ARGUMENT.sub(lambda each: "" if each[0] in shared else each[0], text)
        line = textwrap.fill(f"Shared: {', '.join(known)}.", 116, break_on_hyphens=False) + "\n"
        head, _, tail = rest.partition("\n**Raises**")
        texts.append(f"{head.rstrip()}\n\n{line}{'' if not tail else f'{chr(10)}**Raises**{tail}'}" if known else text)
    return texts, "".join(sorted(shared))


def render() -> str:
    """The whole page: functions first, then types, each in the order of `__all__`."""
    import ckpt_tools

    members = {name: getattr(ckpt_tools, name) for name in ckpt_tools.__all__}
    entries = {name: function_entry(name, member) for name, member in members.items() if inspect.isfunction(member)}
    functions, shared = with_shared(entries)
    types = [f"### {name}\n\n{describe_class(member)}\n" for name, member in members.items() if inspect.isclass(member)]
    from ckpt_tools.runs.hook import BadCheckpointError, Tending

    hooks = [f"### {kind.__name__}\n\n{describe_class(kind)}\n" for kind in (Tending, BadCheckpointError)]
    return "\n".join(
        [HEAD, "## Shared arguments\n", shared, "## Functions\n", *functions, "## Types\n", *types, HOOKS, *hooks]
    )
