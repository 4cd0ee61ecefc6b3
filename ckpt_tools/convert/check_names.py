"""The names that `gather` writes, compared with the architecture that the files beside them name.

Transformers fills what it does not find with random values, and says so in a warning that scrolls by. So nothing is
written that it would load so, unless the model that the names come from was like that already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.names import (
    Expected,
    NameMatch,
    common_prefix,
    group_names,
    is_adapter,
    live_names,
    load_table,
    match_names,
    origins_of,
    tied,
)
from ckpt_tools.checkpoint.names.convert import partner
from ckpt_tools.checkpoint.names.match_architecture import config_misfits
from ckpt_tools.checkpoint.names.table import dig
from ckpt_tools.convert.find_model import is_same, tensors_of
from ckpt_tools.convert.job import Job
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.ask_transformers import expected_for
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.output_names import AssetList, Claim, claim_of
from ckpt_tools.text import escape_name, first_few

Ties = Callable[[str, str], bool]  # Does the architecture give both names to one tensor?


def ties_in(assets: AssetList) -> Ties:
    """Return the ties of the architecture that is named among `assets`; none where nothing is known of it."""
    expected, _ = _expected_in(assets)
    return lambda one, other: expected is not None and tied(one, other, expected)


def _expected_in(assets: AssetList) -> tuple[Expected | None, Mapping[str, object]]:
    try:
        claim = claim_of(assets)
    except UnreadableError:
        claim = None
    return (None, {}) if claim is None else (load_table().expected(claim.architecture, claim.config), claim.config)


def warn_of_ties(tensors: Iterable[TensorEntry], assets: AssetList, opened: Opened) -> tuple[str, ...]:
    """Say which tensors, by names of the hub or of the live model, are one by the config and two in the files."""
    expected, config = _expected_in(assets)
    if expected is None or not expected.ties:
        return ()
    entries = {entry.fqn: entry for entry in tensors}
    live = live_names(entries, expected)
    found = []
    for tie in expected.ties:
        for name in live:
            other = partner(name, tie.target, tie.source, live)
            if other is not None and not is_same(entries[live[name]], entries[live[other]], opened, tied=True):
                said = "is absent, which means true" if dig(config, tie.switch) is None else "is true"
                found.append(
                    f"{live[name]} and {live[other]} differ, and {CONFIG_NAME} makes them one tensor ({tie.switch} "
                    f"{said}): from_pretrained keeps both and warns, but a model that is built from the config loads "
                    f'one in place of the other. Write "{tie.switch}": false into {CONFIG_NAME}'
                )
    return tuple(dict.fromkeys(found))


def check_names(job: Job, originals: Iterable[Opened], *, allow_foreign: bool, is_selection: bool) -> None:
    """Compare the names that a job writes with the architecture that its assets name; the job says what came of it.

    `originals` are the models whose files may be among the assets. What is odd in the names of the one that the config
    comes from may stay so; where ckpt does not know the architecture, its names are what counts. With `is_selection`,
    the tensors that are left out are missing on purpose.
    """
    names = [entry.fqn for entry in job.target.tensors]
    job.warnings = (*job.warnings, *warn_of_ties(job.source.tensors, job.assets, job.opened))
    try:
        claim = claim_of(job.assets)
    except UnreadableError as error:
        job.not_checked = (f"names were not compared with an architecture: {error.what}",)
        return
    if claim is None:
        if is_adapter(names):
            _decide(job, NameMatch(foreign=tuple(names)), NameMatch(), "a whole model", None, allow_foreign)
        elif owners := origins_of(names):
            what = (
                f"the names are {owners[0].what}, and no {CONFIG_NAME} names the model: transformers does not load them"
            )
            job.warnings = (*job.warnings, f"{what} (--assets DIR, with the model's {CONFIG_NAME}, to write the hub's)")
        else:
            way = f"no {CONFIG_NAME} names one (--assets DIR)"
            job.not_checked = (f"names were not compared with an architecture: {way}",)
        return
    title = escape_name(claim.architecture)
    original = next((one for one in originals if one.source is claim.source), None)
    before = () if original is None or original.origin is None else [e.fqn for e in tensors_of(original.origin)]
    expected = expected_for(
        claim.architecture,
        claim.config,
        lambda one: is_adapter(names) or match_names(names, one, claim.config).is_whole,
    )
    if expected is not None:
        held = match_names(names, expected, claim.config)
        excused = match_names(before, expected, claim.config) if before else NameMatch()
        if is_selection:
            excused = replace(excused, missing=(*excused.missing, *_left_out(job, held.missing)))
    elif before and original is not None:
        title = f"the {title} in {escape_name(original.source.root)}"
        held = NameMatch(
            missing=tuple(name for name in before if name not in set(names)),
            foreign=tuple(name for name in names if name not in set(before)),
        )
        excused = NameMatch(missing=tuple(_left_out(job, held.missing))) if is_selection else NameMatch()
    else:
        if is_adapter(names):
            _decide(job, NameMatch(foreign=tuple(names)), NameMatch(), title, None, allow_foreign)
        job.not_checked = (f"names were not compared with {title}: not known to ckpt",)
        return
    if _decide(job, held, excused, title, expected, allow_foreign):
        job.architecture = title
    _check_shapes(job, claim, allow_foreign)


def _check_shapes(job: Job, claim: Claim, allow_foreign: bool) -> None:
    """Refuse, or warn of, a config with other sizes than the tensors have: no loader takes the two together."""
    wrong = config_misfits(claim.config, ((entry.fqn, entry.shape) for entry in job.target.tensors))
    what = f"{first_few(wrong, 2)}: {CONFIG_NAME} does not belong to these weights"
    if wrong and not allow_foreign:
        here, root = (os.path.join(path, "") for path in (claim.source.root, job.opened.source.root))
        is_own = here.startswith(root) or root.startswith(here)  # beside the parts of a step
        way = "correct it, or move it away and pass --assets DIR" if is_own else "pass --assets DIR"
        hint = f"{way}, with the config of this step's model; --allow-foreign-names writes them anyway"
        raise UnreadableError(what, where=here + CONFIG_NAME, hint=hint)
    job.warnings = (*job.warnings, what) if wrong else job.warnings


def _left_out(job: Job, missing: Iterable[str]) -> Iterator[str]:
    """Yield those of the missing names that the source has, though they are not written."""
    written = {job.names.get(entry.fqn, entry.fqn) for entry in job.target.tensors}
    others = tuple(entry.fqn for entry in job.opened.checkpoint.tensors if entry.fqn not in written)
    return (name for name in missing if any(fqn == name or fqn.endswith(f".{name}") for fqn in others))


def _decide(
    job: Job, held: NameMatch, before: NameMatch, title: str, expected: Expected | None, allow_foreign: bool
) -> bool:
    """Raise, or warn of what is allowed or was in the original already; is all that is left whole?"""
    news, old = held.split(before)
    if not old.is_whole:
        job.warnings = (*job.warnings, f"as in the original or as selected, {_describe(old, title, expected)}")
    if news.is_whole:
        return old.is_whole
    what = _describe(news, title, expected)
    if owners := origins_of(news.foreign):
        what += f"; the names are {owners[0].what}"
    if not allow_foreign:
        way_on = _way_on([entry.fqn for entry in job.target.tensors], news, expected, job.opened.source.root)
        raise UsageError(what, where=job.opened.source.root, hint=f"{way_on}; --allow-foreign-names writes them anyway")
    job.warnings = (*job.warnings, f"{what} (--allow-foreign-names)")
    return False


def _describe(held: NameMatch, title: str, expected: Expected | None) -> str:
    by = "not known how a loader fills them" if expected is None else f"by the names of {expected.by}"
    fate = "would be filled with random values" if expected is not None and expected.is_proven else by
    groups = (
        (held.foreign, "name", f"not of {escape_name(title)}"),
        ((*held.missing, *held.incomplete), "weight", f"missing, {fate}"),
    )
    return " and ".join(
        f"{len(names)} {noun}{' is' if len(names) == 1 else 's are'} {what} "
        f"({first_few(group_names(names, expected), limit=4)})"
        for names, noun, what in groups
        if names
    )


def _way_on(names: Sequence[str], rest: NameMatch, expected: Expected | None, source: str) -> str:
    owners = origins_of(rest.foreign)
    if owners:
        return owners[0].way_on.replace("{source}", source)
    if expected is None:
        return "`ckpt diff --keys-only` lists the names"
    for prefix in common_prefix(names):
        plain = [name[len(prefix) :] for name in names]
        if match_names(plain, expected, {}).is_whole:
            return f"--strip-prefix {prefix.removesuffix('.')}"
    others = load_table().architectures_of(names) if rest.foreign else []
    if others and expected.architecture not in others:
        return f"they are those of {', '.join(others[:3])}: is it the config of this model?"
    for path, count in expected.counts.items():
        inside = path.removesuffix("*")
        if any(name.startswith(inside) for name in (*rest.foreign, *rest.missing)):
            key = expected.count_keys[path]
            return f"{CONFIG_NAME} has {key} = {count}: is it the config of this model?"
    if not rest.foreign:
        return f"save the whole model, or correct the architecture in {CONFIG_NAME}"
    return f"is it the config of this model? {len(rest.foreign)} of {len(names)} names are not its own"
