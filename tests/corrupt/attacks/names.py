"""Names of tensors that drive terminals, browsers, globs and paths: sound checkpoints, to be shown harmlessly."""

from __future__ import annotations

from corrupt.attacks.opcodes import text, write_run
from corrupt.attacks.recipe import Case, add, harmless
from samples import safetensors_bytes, tensor

NAMES = {
    "ansi": "\x1b[2J\x1b]0;title\x07\x1b[8m.weight",
    "c1": "\x9b31m\x85.weight",
    "bidi": "\u202egnp.weight\u2066\u2069",
    "invisible": "we\u200bi\u2060ght\ufeff\u00ad",
    "markup": "[red]w[/red][link=file:///etc/passwd]x[/link]",
    "html": "<script>alert(1)</script>&lt;\"'",
    "newline": "a\nError: nothing is wrong\r\n.weight\t",
    "separator": "a\u2028b\u2029c",
    "parent": "../../../outside/canary",
    "absolute": "/etc/passwd",
    "shell": "$(touch canary);`touch canary`|x",
    "glob": "**{a,b}[!x]?*",
    "format": "{0.__class__}%s%n{x!r}",
    "percent": "%(asctime)s",
    "option": "--overwrite",
    "dots": "." * 200,
    "empty": "",
    "space": " ",
    "backslash": "\\x1b[2J",
    "astral": "\U0001f468\u200d\U0001f469\U000e0041",
    "combining": "a" + "\u0301" * 300,
    "wide": "\uff21\u3000\u30c6",
    "long": "x." * 2000,
    "digits": "9" * 1000 + ".weight",
    "wrapper": "_orig_mod." * 100 + "w",
    "optimizer": "optimizer.state.exp_avg",
    "model": "model.model.model.w",
    "surrogate-like": "\ufffd\uffff",
    "private": "\ue000\U0010ffff",
    "dunder": "__class__.__init__.__globals__",
    "metadata-lookalike": "__metadata__ ",
}


def _hf(case: Case, name: str) -> None:
    case.source.mkdir()
    raw = safetensors_bytes({name: tensor("F32", 4, 3), "other": tensor("BF16", 5)}, metadata={name: name})
    (case.source / "model.safetensors").write_bytes(raw)


for title, name in NAMES.items():
    codes = harmless()
    add(
        f"name-{title}-hf", f"a tensor named {name[:30]!a}", lambda case, n=name: _hf(case, n), codes, mesh_verb="shard"
    )
    if title == "optimizer":  # optimizer state is left out, and then nothing is left
        codes = {**codes, "gather": (4,)}
    add(
        f"name-{title}-dcp",
        f"a tensor named {name[:30]!a}",
        lambda case, n=name: write_run(case.source, fqn=text(n)),
        codes,
    )

add("name-metadata-key-dcp", "a tensor with the name that safetensors keeps for itself",
    lambda case: write_run(case.source, fqn=text("__metadata__")), {**harmless(), "gather": (2, 4)})  # fmt: skip


def _both(case: Case) -> None:
    from corrupt.attacks.opcodes import index, info, item, size, tensor

    write_run(
        case.source,
        fqn=text("_orig_mod.a\x1b[2J"),
        entries=[(text("a\x1b[2J"), tensor([2, 3]))],
        storage=[(index(text("a\x1b[2J"), size(0, 0)), info(text("__0_0.distcp"), 0, len(item())))],
    )


add("name-twice-when-stripped", "two names that become one when wrappers are stripped", _both,
    {**harmless(), "gather": (2,)})  # fmt: skip
