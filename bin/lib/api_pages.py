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
from collections.abc import Callable, Mapping

from ckpt_tools.cli.commands import COMMANDS
from ckpt_tools.options import Argument, Option, options_of
from ckpt_tools.results import CheckedResult, Result

HEAD = """\
# Library reference

<!-- Written by bin/docs from signatures and docstrings. Do not edit. -->

What `import ckpt_tools` offers, without importing torch. The functions have the names and defaults of the
[command line](cli.md), which is a thin layer over them. What is stable: [stability](stability.md).

## Arguments

The keyword of an option is its name on the command line with underscores: `--dry-run` is `dry_run`. Where that is a
word of Python, an underscore follows: `from_`, `for_`. These options have a second keyword, which goes on working:

{names}

- A path is text or any `os.PathLike`; an option that can be repeated takes one value or several.
- A mesh is `8`, `"dp_shard=8,tp=2"`, `{{"dp_shard": 8, "tp": 2}}`, a `Mesh`, or torch's `DeviceMesh` with named axes.
- A dtype is `"bf16"`, `"bfloat16"` or `torch.bfloat16`.
- `push` takes the options of the model card as `card=CardFacts(…)`, and `card=False` for `--no-card`.

A missing source is a `MissingError`, which is also a `FileNotFoundError`; a destination that exists is a
`DestinationExistsError`, which is also a `FileExistsError`. `str(error)` has what happened, where, and what to do.

## Results

Every result has `to_dict()`, the document that the command prints with `--json` ([schemas](schemas)), a `repr` of at
most 20 lines, and a table in notebooks.

- True or false: {checked}. They are false when the command would end with exit code 3, so `assert verify(path)` and
  `assert diff(a, b)` fail for damage and for a difference. `ok` says the same.
- Plain objects: {plain}.
"""
_LEFT_OUT = ("to_json",)  # Methods for other results
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Source|Note|Example):")
_ARGUMENT = re.compile(r"^- `(\w+)`: .*\n(?:  .*\n)*", re.MULTILINE)
_ENTRY = re.compile(r"(\*{0,2}\w[\w.]*): (.*)")
WIDTH = 100


HOOKS = """## Hooks

`ckpt_tools.hooks` manages the checkpoints of a run from inside ([guide](../guides/retention.md)). `TrainerTending` is
the callback of transformers' Trainer and `LightningTending` that of Lightning: both take the settings of `Tending`.
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
        elif in_section and line.startswith("    >>> "):
            parts += ["```python", line.strip()]
        elif parts[-1:] and parts[-1].startswith(">>> "):
            parts += [line.strip(), "```"]
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


def signature(called: str, function: Callable[..., object]) -> str:
    """`def called(…)` as one would write it, on one line or on one per parameter."""
    found = inspect.signature(function)
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        is_typed = parameter.annotation is not parameter.empty
        name = f"*{parameter.name}" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name
        typed = f"{name}: {type_text(parameter.annotation)}" if is_typed else name
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(typed + default)
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    short = f"{called}({', '.join(parts)}){returns}"
    if len(short) <= WIDTH:
        return short
    return "\n".join([f"{called}(", *(f"    {part}," for part in parts), f"){returns}"])


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
    """A function under a heading of its own; what the command line takes as well is described there."""
    text = describe(function.__doc__)
    if (command := name.replace("_", "-")) in COMMANDS and hasattr(function, "options"):
        both = {each.name for each in options_of(function) if isinstance(each.stated, Argument | Option)}
        text = _ARGUMENT.sub(lambda entry: "" if entry[1] in both else entry[0], text)
        text = text.replace("**Args**\n", f"**Args**: the options of [`ckpt {command}`](cli.md#ckpt-{command}).\n")
    return f"### {name}\n\n```python\ndef {signature(name, function)}\n```\n\n{text}\n"


def default_of(field: dataclasses.Field[object]) -> str:
    """The default of a field, as one would write it after its type."""
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
            f"- `{f.name}: {f.type}{default_of(f)}`" + (f": {docs[f.name]}" if f.name in docs else "")
            for f in dataclasses.fields(kind)
        ]
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        if name.startswith("_") or name in _LEFT_OUT or not inspect.isfunction(function) or not function.__doc__:
            continue
        call = signature(name, function).replace("(self, ", "(").replace("(self)", "()") if function is member else name
        rows.append(f"- `{call}`: {inspect.cleandoc(function.__doc__).splitlines()[0]}")
    return "\n\n".join([*parts, "\n".join(rows)]) if rows else parts[0]


def names_table(functions: Mapping[str, Callable[..., object]]) -> str:
    """The options whose keyword is not the name of their field, as a table."""
    users: dict[tuple[str, str, str], list[str]] = {}
    for name, function in functions.items():
        stated = options_of(function)
        taken = {each.name for each in stated}
        for each in stated:
            if each.word not in taken:
                users.setdefault((each.flag.partition("/")[0], each.word, each.name), []).append(name)
    rows = [
        f"| `{flag}` | `{word}` | `{old}` | {', '.join(used)} |" for (flag, word, old), used in sorted(users.items())
    ]
    return "\n".join(["| option | keyword | also | functions |", "|---|---|---|---|", *rows])


def results_of(members: Mapping[str, object], *, checked: bool) -> str:
    """The results that are true or false, or those that are not."""
    kinds = {name: kind for name, kind in members.items() if isinstance(kind, type) and issubclass(kind, Result)}
    return ", ".join(f"`{name}`" for name, kind in kinds.items() if issubclass(kind, CheckedResult) is checked)


def render() -> str:
    """The whole page: functions first, then types, each in the order of `__all__`."""
    import ckpt_tools

    members = {name: getattr(ckpt_tools, name) for name in ckpt_tools.__all__}
    verbs = {
        name: member for name, member in members.items() if inspect.isfunction(member) and hasattr(member, "options")
    }
    head = HEAD.format(
        names=names_table(verbs), checked=results_of(members, checked=True), plain=results_of(members, checked=False)
    )
    functions = [function_entry(name, member) for name, member in members.items() if inspect.isfunction(member)]
    types = [f"### {name}\n\n{describe_class(member)}\n" for name, member in members.items() if inspect.isclass(member)]
    from ckpt_tools.runs.hook import BadCheckpointError, Tending

    hooks = [f"### {kind.__name__}\n\n{describe_class(kind)}\n" for kind in (Tending, BadCheckpointError)]
    return "\n".join([head, "## Functions\n", *functions, "## Types\n", *types, HOOKS, *hooks])
