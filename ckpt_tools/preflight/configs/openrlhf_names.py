"""OpenRLHF's options by script and by age; the names themselves are in `names/openrlhf.txt`.

Options got dots between 0.10.1 and 0.10.2 (April 2026): a command line with names of both sides stops every release.
"""

from __future__ import annotations

from functools import cache

from ckpt_tools.preflight.configs.names import known, newest_release

SCRIPTS = ("sft", "dpo", "rm", "ppo_ray", "ppo", "kto", "kd", "prm")
"""What `train_….py` there is, or was."""
SWITCHES = known("openrlhf", "switches", "plan_switches")
"""Options that take no word."""
LISTS = known("openrlhf", "lists")
"""Options that take several."""
PLAN = known("openrlhf", "plan_switches", "plan_values")
"""Options that the notes of the FSDP2 plan add; no release has them."""
NAMES = SWITCHES | known("openrlhf", "values", "plan_values", *SCRIPTS)
"""All options."""


@cache
def _age(script: str) -> dict[str, str]:
    """Return option → the newest release in which a script has it; of any script for ''."""
    found = dict(newest_release("openrlhf", "switches")) | dict(newest_release("openrlhf", "values"))
    for name in SCRIPTS:
        if script in ("", name):
            found |= newest_release("openrlhf", name)
    return found


@cache
def options_with_dots(script: str) -> frozenset[str]:
    """Return the options that only releases with dots have."""
    return frozenset(name for name in _age(script) if "." in name)


@cache
def options_before_dots(script: str) -> frozenset[str]:
    """Return the options that no release with dots has any more, for one script."""
    age = _age(script)
    dotted = {age[name] for name in options_with_dots(script)}
    return frozenset(name for name, release in age.items() if "." not in name and release not in dotted)


@cache
def options_of_others(script: str) -> frozenset[str]:
    """Return the options that other scripts have in some release, and this one in none."""
    if not script:
        return frozenset()
    others = known("openrlhf", *(name for name in SCRIPTS if name != script))
    return others - known("openrlhf", script, "values") - PLAN
