"""What PEFT makes of target_parameters: one wrapper for each parameter, nested where a module has several.

Source: peft 0.21, tuners/tuners_utils.py (`_inject_parameters`), tuners/lora/layer.py (`ParamWrapper`).
Letters: e experts, o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, rank_of
from ckpt_tools.adapters.ecosystems.peft.target_names import matched
from ckpt_tools.adapters.ecosystems.simulation import Loading, RejectedError

Levels = Mapping[int, Mapping[str, Shape]]
"""Number of wrappers outside → role → shape."""
_MOST = 4
"""Parameters of one module that are tried in every order: which of them is the outer one, the model's class decides."""


def wrapped_parameters(config: Config, base: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return module → its parameters that PEFT wraps."""
    wanted = config.get("target_parameters")
    found: dict[str, list[str]] = defaultdict(list)
    for name in base if isinstance(wanted, list) and wanted else ():
        if matched(wanted, name):
            module, _, parameter = name.rpartition(".")
            found[module].append(parameter)
    return found


def check_parameters(
    module: str, parameters: Sequence[str], levels: Levels, config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    """Hold the factors of a module's wrappers against its parameters.

    Raises:
        RejectedError: They are of other shapes than PEFT makes.
    """
    lacking = [role for level in range(len(parameters)) for role in ("A", "B") if role not in levels.get(level, {})]
    if lacking:
        what = f"the file lacks {len(lacking)} factors of {len(parameters)} target_parameters: PEFT begins them anew"
        loading.say("loader-incomplete", "error", module, what, "was the adapter saved whole?")
    if len(parameters) > _MOST:
        what = f"{len(parameters)} target_parameters of one module: in which order is not known"
        loading.say("loader-unchecked", "warning", module, what)
        return
    ways = [_ways(rank_of(config, f"{module}.{each}"), base[f"{module}.{each}"]) for each in parameters]
    if any(all(_agrees(levels.get(level, {}), way) for level, way in enumerate(order)) for order in permutations(ways)):
        return
    found = ", ".join(f"{role} {list(shape)}" for factors in levels.values() for role, shape in factors.items())
    wanted = ", ".join(f"{each} {list(base[f'{module}.{each}'])}" for each in parameters)
    raise RejectedError(f"size mismatch: {module} has {found}, and its target_parameters are {wanted}")


def _ways(r: int, weight: Shape) -> tuple[Mapping[str, Shape], ...]:
    """Return the shapes of A and B; stacked experts may be (e, i, o) or (e, o, i), which the class decides."""
    if len(weight) == 2:
        return ({"A": (r, weight[1]), "B": (weight[0], r)},)
    if len(weight) != 3:
        raise RejectedError(f"a parameter of {len(weight)} dims, where PEFT wraps those of 2 and 3")
    e, one, other = weight
    return (
        {"A": (r * e, one), "B": (other, r * e)},
        {"A": (r * e, other), "B": (one, r * e)},
    )


def _agrees(factors: Mapping[str, Shape], ways: Sequence[Mapping[str, Shape]]) -> bool:
    return any(all(way.get(role) == shape for role, shape in factors.items()) for way in ways)
