"""`ckpt estimate`."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import print_json, waiting
from ckpt_tools.cli.reports import report_to
from ckpt_tools.cli.screen import Screen, terminal
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import Estimate
from ckpt_tools.options.output import HtmlOptions, Output
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size


def run(call: Call[Estimate], page: HtmlOptions, output: Output) -> int:
    """Estimate, and print how much memory is needed."""
    given = call.given
    if "frozen_dtype" in given and not given.get("lora") and "lora_rank" not in given:
        raise UsageError("--frozen-dtype needs --lora")
    shows_all = "all" in given.get("strategy", ()) and "activation_checkpointing" not in given
    with report_to(page.html, "estimate", str(given.get("model") or given.get("params") or ""), output) as report:
        with waiting(output, "estimating"):
            result = call(activation_checkpointing="both") if shows_all else call()
        if report is not None:
            from ckpt_tools.report.run_pages import estimate_page

            report(estimate_page(result))
    if output.json:
        print_json(result.to_json())
    else:
        _print(result, output)
    return 0 if result.fits or result.gpu_memory is None else 3


def _print(result: Estimate, output: Output) -> None:
    screen = terminal()
    if not output.quiet:
        _print_table(screen, result)
        _print_margin(screen, result)
        if output.verbose:
            _print_peaks(screen, result)
        for text in result.notes:
            screen.line(f"note: {text}")
        for reason in dict.fromkeys(case.why_not_tracked for case in result.cases if case.why_not_tracked):
            screen.line(f"note: by the formula: {escape_name(reason)}")
    if result.gpu_memory is not None:
        _print_verdict(screen, result, quiet=output.quiet)


def _print_table(screen: Screen, result: Estimate) -> None:
    first = result.cases[0].case
    most = max(case.needed for case in result.cases)
    unit, scale = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    ranks = f"{first.mesh.world_size} ranks" if first.mesh.world_size != 1 else "1 rank"
    screen.line(f"{escape_name(result.model)}: {result.params:,} parameters, {ranks}", "heading")
    dtypes = f"{first.param_dtype} compute, {first.reduce_dtype} reduce, {first.master_dtype} master"
    tokens = f"{first.batch_size} × {first.seq_len} tokens per rank, {first.optimizer}"
    screen.line(f"{dtypes}, {tokens}; {unit} on the rank that holds the most")
    is_tracked = any(case.tracked is not None for case in result.cases)
    headers = ["", "mesh", "params", "grads", "optimizer", "activations", "gathered", "peak"]
    headers += ["formula", "with margin"] if is_tracked else ["with margin"]
    has_host = any(case.per_rank.host for case in result.cases)
    headers += (["host"] if has_host else []) + (["fits"] if result.gpu_memory is not None else [])
    rows = []
    for case in result.cases:
        memory = case.per_rank
        sizes = [memory.params, memory.grads, memory.optimizer, memory.activations, memory.gathered, memory.peak]
        by_formula = _size(case.formula.peak, scale)
        by_formula += "" if case.difference is None else f" ({case.difference:+.0%})"
        row = [case.case.label, str(case.case.mesh), *(_size(size, scale) for size in sizes)]
        row += [by_formula] if is_tracked else []
        row += [_size(case.needed, scale)]
        row += [_size(memory.host, scale)] if has_host else []
        row += [_FITS[case.fits]] if result.gpu_memory is not None else []
        rows.append(row)
    screen.table(headers, rows, align="ll" + "r" * (len(headers) - 2))


def _size(nbytes: int, scale: int) -> str:
    return f"{nbytes / scale:.1f}" if nbytes >= 10 * scale else f"{nbytes / scale:.2f}"


_FITS = {True: "yes", False: "no", None: "not known"}
_VERDICTS = {True: "fits", False: "does not fit", None: "not known whether it fits"}


def _print_margin(screen: Screen, result: Estimate) -> None:
    margin = result.cases[0].margin
    screen.line(
        f"  margin: {format_size(margin.context)} CUDA context, {format_size(margin.workspace)} workspaces, "
        f"{format_size(margin.nccl)} NCCL, {format_size(margin.fragmentation)} fragmentation",
        "dim",
    )


def _print_peaks(screen: Screen, result: Estimate) -> None:
    for case in result.cases:
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in case.per_rank.at_peak.items() if size)
        screen.line(f"  {case.case.label} at its peak: {parts}", "dim")
    memory = format_size(result.peak_rss_bytes)
    screen.line(f"  estimated in {result.seconds:.1f} s with {memory} of memory", "dim")


def _print_verdict(screen: Screen, result: Estimate, *, quiet: bool) -> None:
    size = result.gpu_memory or 0
    device = f"{size / 10**9:.3g} GB ({format_size(size)})"
    if result.fits:
        fitting = ", ".join(case.case.label for case in result.cases if case.fits)
        screen.line(f"fits in {device}: {fitting}")
        return
    for case in result.cases:
        if case.doubt is not None:
            screen.line(f"not known whether it fits in {device}: {case.case.label}: {case.doubt}")
    if result.fits is False:
        screen.line(f"does NOT fit in {device}")
    for proposal in () if quiet else result.proposals:
        found = proposal.estimate
        how = "formula" if found.tracked is None else "tracked"
        screen.line(f"  {proposal.what}: {format_size(found.needed)} ({how}), {_VERDICTS[found.fits]}")
    advice = result.advice
    if advice is not None:
        screen.line(f"hint: {advice.what}")
    elif result.proposals:
        screen.line("hint: none of the changes tried fits: use a larger device, more ranks, or a smaller model")
