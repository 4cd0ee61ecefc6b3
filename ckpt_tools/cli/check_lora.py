"""`ckpt check-lora`."""

from __future__ import annotations

from math import isclose

from ckpt_tools.adapters.check import LoraCheck
from ckpt_tools.adapters.ecosystems.loader_report import LoaderReport
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, note_identities, print_json, say, say_findings, waiting
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import counted, escape_name

_MAX_SHOWN = 20
_VERDICTS = {"loads": "ok", "fails": "NOT ok", "unknown": "not known: nothing is wrong in what was checked"}


def run(call: CommandCall[LoraCheck], output: OutputOptions) -> int:
    """Check an adapter, and print what loaders make of it."""
    with waiting(output, "checking"):
        result = call()
    if output.json:
        print_json(result.to_dict())
        return 0 if result.ok else 3
    if result.convention is None:  # else the lines on the adapter say more
        note_identities([result.identity] if result.identity is not None else [], output)
    say_findings(result.findings, most=None if output.verbose else _MAX_SHOWN)
    if not output.quiet:
        if result.convention is not None:
            _say_adapter(result, verbose=output.verbose)
        if result.loaders:
            if (base := call.given.get("base")) is not None:
                say(f"compared with {escape_name(str(base))}: modules and shapes")
            _say_loaders(result, verbose=output.verbose)
        for text in result.not_checked:
            note(f"not checked: {text}")
        say(f"{call.shown('source')}: {_VERDICTS[result.verdict]}")
    return 0 if result.ok else 3


def _say_adapter(result: LoraCheck, *, verbose: bool) -> None:
    alpha = "not known" if result.alpha is None else f"{result.alpha.value:g} ({escape_name(result.alpha.source)})"
    ranks = " (others differ)" if len(result.ranks) > 1 else ""
    alphas = " (others differ)" if len(result.alphas) > 1 else ""
    family = "" if result.architecture is None else f", for {result.architecture}"
    say(f"{result.kind} of {counted(result.num_modules, 'module')}{family}, in {result.convention}'s names")
    say(f"rank {result.rank if result.rank is not None else 'none'}{ranks}, alpha {alpha}{alphas}")
    targets = result.targets if verbose else result.targets[:8]
    more = f" … and {len(result.targets) - len(targets):,} more" if len(targets) < len(result.targets) else ""
    say(f"targets: {', '.join(map(escape_name, targets))}{more}")


def _say_loaders(result: LoraCheck, *, verbose: bool) -> None:
    told = set(result.findings)
    say("loaders (* decides):")
    for report in result.loaders:
        total = report.num_matched + len(report.unmatched)
        counts = f"{report.num_matched} of {total} tensors, {counted(len(report.matched), 'module')}"
        mark = "*" if report.loader in result.judges else " "
        say(f"{mark}{report.loader:>9}: {_verdict(report)}" + (f" ({counts})" if report.loads else ""))
        if verbose:
            say_findings([finding for finding in report.findings if finding not in told], indent=" " * 11)


def _verdict(report: LoaderReport) -> str:
    if report.loads is None:
        return "not known"
    if not report.loads:
        return "refuses it"
    if not report.changes:
        return "loads nothing, with a warning at most"
    if report.factor is not None and not isclose(report.factor, 1, rel_tol=1e-4):
        return f"loads it at {report.factor:.4g} times the trained strength"
    if not report.is_whole:
        return "loads it, but not as intended"
    return "loads it, whole" if report.is_proven else "loads it, if the base model has these modules"
