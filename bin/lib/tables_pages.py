"""docs/reference/diagnoses.md and preflight-rules.md: tables of the package, as pages."""

from __future__ import annotations

from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.preflight.rules import RULES
from ckpt_tools.preflight.rules.rule import ALL

_HEADINGS = (
    "Ranks and mesh", "Engines and what they exclude", "Options of FSDP1 and FSDP2",
    "Tensor, sequence, expert and pipeline parallelism", "The model", "Dtypes", "Saving, loading and memory",
    "Adapters and quantisation", "Optimizers", "What only one framework does", "Sizes", "Batches and lengths",
    "Launch", "Schedules", "Words that options take", "Options that exclude or need each other",
)  # fmt: skip
"""The tens of an id are its heading."""


def render_diagnoses() -> str:
    """Return every way in which FSDP2 is known to break, as a page."""
    lines = [
        "# Diagnoses",
        "",
        "<!-- Written by bin/docs from ckpt_tools/fsdp2/diagnoses.toml. Do not edit. -->",
        "",
        "How FSDP2 training breaks, by the id that `ckpt smoke`, `audit`, `compare_ranks`, `watch` and `diagnose`",
        "give.",
        "*Silent* failures raise nothing at first; only an audit or a comparison of ranks finds them.",
        "",
    ]
    for entry in CATALOGUE.values():
        lines += [
            f"## {entry.id}",
            "",
            f"- **Symptom**: {entry.symptom}.{' Silent.' if entry.silent else ''}",
            f"- **Cause**: {entry.cause}.",
            f"- **Fix**: {entry.fix}.",
            f"- **Found by**: {', '.join(entry.found_by)}.",
            "",
        ]
    return "\n".join(lines)


def render_rules() -> str:
    """Return the rules as a page."""
    text = (
        "# Rules of preflight\n\n<!-- Written by bin/docs from ckpt_tools/preflight/rules. Do not edit. -->\n\n"
        "What `ckpt preflight` looks for in a trainer's config, by the id that it gives. An *error* means that the\n"
        "run would fail, or would not do what the config says; a *warning* that it runs, but differently\n"
        "from what one may think. An id is never changed and never given to another rule.\n"
    )
    for number, heading in enumerate(_HEADINGS):
        text += f"\n## {heading}\n"
        for one in (one for one in RULES if one.id.startswith(f"CKPT{number:02}")):
            whose = "all" if one.frameworks == ALL else ", ".join(one.frameworks)
            text += f"\n### {one.id}: {one.title}\n\n- **{one.severity.capitalize()}** in {whose}.\n"
            text += f"- **Why**: {one.why}.\n- **Fix**: {one.fix}.\n"
    return text
