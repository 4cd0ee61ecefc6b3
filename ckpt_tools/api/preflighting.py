"""`preflight`: everything that can be checked before a run."""

from __future__ import annotations

from ckpt_tools.options import takes
from ckpt_tools.preflight.options import PreflightOptions
from ckpt_tools.preflight.report import PreflightReport


@takes(PreflightOptions)
def preflight(options: PreflightOptions) -> PreflightReport:
    """Read a trainer's config and say whether the run will start, fit, load and train.

    Config and rules, memory, the checkpoint against the model and the mesh, and a smoke run of a cut-down model. What
    could not be checked is listed in the report (`not_checked`); where that is the config itself, or an option on which
    something depends, `ok` is false. The trainer itself is never imported.

    Raises:
        UsageError: Not the config of a known trainer, or a path that does not exist.
        UnreadableError: The config is damaged.
    """
    # pydantic comes with it, which no other command needs.
    from ckpt_tools.preflight.run import preflight as run

    return run(options)
