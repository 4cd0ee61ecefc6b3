"""CKPT13x: when a run saves and evaluates."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.rule import Case, Setting, Violation, enabled, error_rule, shown

_PARTS = 1_000_000
"""Ratios are compared as whole numbers, as Trainer does."""


def _strategy(case: Case, default: str, *names: str) -> tuple[str, Setting | None]:
    """Return a strategy, which may be a bare `no` in YAML."""
    found = case.option(*names)
    return default if found is None else "no" if found.value is False else found.text, found


@error_rule(
    "CKPT130: the best model is asked for, and not every save follows an evaluation",
    why="Trainer can only go back to a checkpoint that was evaluated: it refuses other schedules before it starts",
    fix="the same strategy for both, and save_steps a multiple of eval_steps",
    frameworks=("trainer",),
)
def best_is_evaluated(case: Case) -> Iterator[Violation]:
    """Source: transformers 5.23.0 `training_args.py:1575-1583,1749-1774`."""
    wanted = enabled(case.get("load_best_model_at_end"))
    save, save_by = _strategy(case, "steps", "save_strategy")
    evaluate, eval_by = _strategy(case, "no", "eval_strategy", "evaluation_strategy")
    if wanted is None or save == "best":
        return
    if evaluate != save:
        if evaluate == "no" or save == "no":
            key = "save_strategy" if save == "no" else "eval_strategy" if eval_by is None else eval_by.key
            fix = f"{key}: {evaluate if save == 'no' else save}"
        else:
            key = "save_strategy" if save_by is None else save_by.key
            fix = f"{key}: {evaluate}"
        yield Violation(key, f"{wanted}, and it saves by {shown(save)} and evaluates by {shown(evaluate)}", fix)
    elif save == "steps":
        yield from _multiples(case)


def _multiples(case: Case) -> Iterator[Violation]:
    saves, found = case.option("save_steps"), case.option("eval_steps")
    every = 500.0 if saves is None else saves.number
    step = None if found is None else found.number
    if found is None or step == 0:  # then it evaluates whenever it logs
        logged = case.option("logging_steps")
        step = None if logged is None else logged.number  # by default every 500 steps, and in TRL every 10
    if every is None or step is None or step <= 0 or every <= 0:
        return
    if (every < 1) == (step < 1) and round(every * _PARTS) % round(step * _PARTS) == 0:
        return
    key = "save_steps" if saves is None else saves.key
    right = step if (every < 1) != (step < 1) else max(every // step, 1) * step
    yield Violation(
        key,
        f"it saves every {every:g} steps and evaluates every {step:g}: no save may lie between evaluations",
        f"{key}: {right:g}",
    )
