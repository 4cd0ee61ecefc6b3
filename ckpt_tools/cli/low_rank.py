"""`ckpt extract-lora` and `ckpt resize-lora`."""

from __future__ import annotations

from ckpt_tools.adapters.low_rank import LoraResult, ModuleLoss
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.convert import print_conversion
from ckpt_tools.cli.output import print_json, progress_of, report_to, say, say_findings
from ckpt_tools.cli.views import page
from ckpt_tools.options.output import HtmlOptions, OutputOptions
from ckpt_tools.text import counted, escape_name

_MOST = 10  # Rows


def run(call: CommandCall[LoraResult], how: HtmlOptions, output: OutputOptions) -> int:
    """Extract or resize, and print what is lost."""
    is_extraction = "tuned" in call.given
    shown = f"{call.shown('tuned')} − {call.shown('base')}" if is_extraction else call.shown("source")
    command = "extract-lora" if is_extraction else "resize-lora"
    with report_to(how.html, command, shown, output) as report:
        with progress_of(output) as factory:
            result = call(progress=factory)
        if report is not None:
            report(lambda: _page(result, command, shown))
    if output.json:
        print_json(result.to_dict())
        return 0 if result.ok else 3
    if not output.quiet:
        say(f"the change {shown}" if is_extraction else shown)
    say_findings(result.findings)
    if result.ok:
        print_conversion(result.conversion, output)
    else:
        say(f"nothing was written to {escape_name(result.conversion.destination)}")
    if not output.quiet:
        _say_losses(result, every=output.verbose)
    return 0 if result.ok else 3


def _worst(result: LoraResult) -> list[ModuleLoss]:
    return sorted(result.modules, key=lambda module: -module.loss)


def _cells(module: ModuleLoss) -> tuple[str, str, str, str, str]:
    before = f"{module.rank_before} → " if module.rank_before is not None else ""
    return module.path, f"{before}{module.rank}", f"{module.norm:.3g}", f"{module.loss:.3g}", module.method


def _say_losses(result: LoraResult, *, every: bool) -> None:
    listed, most = _worst(result), None if every else _MOST
    for path, rank, _, loss, method in map(_cells, listed[:most]):
        say(f"  loss {loss:<9} rank {rank:<9} {method:<15} {escape_name(path)}")
    if most is not None and len(listed) > most:
        say(f"  … and {len(listed) - most} more with less loss (-v lists all)")
    for fqn, norm, why in result.left_out[:most]:
        say(f"  left out{f' (norm {norm:.3g})' if norm is not None else ''}: {escape_name(fqn)}: {why}")
    if most is not None and len(result.left_out) > most:
        say(f"  … and {len(result.left_out) - most} more left out (-v lists all)")
    say(_verdict(result))


def _verdict(result: LoraResult) -> str:
    more = f", {counted(len(result.left_out), 'tensor')} left out" if result.left_out else ""
    return f"loss {result.loss:.3g} of the whole change: {counted(len(result.modules), 'module')}{more}"


def _page(result: LoraResult, command: str, shown: str) -> page.Page:
    """Return the page of the losses."""
    chart = page.Depth(
        "Loss by layer, a line for each kind of module", {"": {m.path: m.loss for m in result.modules}}, []
    )
    columns = "module, >rank, >norm of the change, >loss, method"
    table = page.PageTable.of("Modules, the greatest loss first", columns, _worst(result), _cells)
    sections = [page.PageSection("Loss", [*([chart] if chart.places() else []), table])]
    left = [f"{each.fqn}: {each.why}" for each in result.left_out]
    sections += [*page.findings_section(result.findings), *page.notes_section("Left out", left)]
    sections += page.notes_section("Notes", result.conversion.notes)
    mood = page.mood_of(ok=result.ok, left=result.left_out)
    return page.Page(command, shown, sections, mood, _verdict(result))
