"""`commit`: the last step of a conversion whose last part died before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ckpt_tools.api.commands import parse_command
from ckpt_tools.api.conversions import gather, reshard, shard
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.errors import DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.options import options_of, takes
from ckpt_tools.options.rewrite import CommitOptions
from ckpt_tools.remote.places import is_remote, open_shared_sink
from ckpt_tools.text import first_few

_FUNCTIONS: Mapping[str, Callable[..., Conversion]] = {"shard": shard, "reshard": reshard, "gather": gather}


@takes(CommitOptions)
def commit(options: CommitOptions) -> Conversion:
    """Publish what the parts of a conversion have written; what they were asked for stands beside it.

    The source must be there as it was for them, under the same path.

    Raises:
        UnreadableError: Nothing is being written there.
        StorageError: Parts are missing; the message says which.
        UsageError: What is being written there does not say by which command.
        DestinationExistsError: It is published already, or the source has changed since.
    """
    destination = os.fspath(options.destination)
    try:
        with open_shared_sink(destination) as sink:
            claim = sink.find_claim()
    except DestinationExistsError:
        hint = "`ckpt verify` says whether it is whole"
        raise DestinationExistsError("it is published already", where=destination, hint=hint) from None
    if claim is None:
        raise UnreadableError("nothing is being written here", where=destination, hint="is it published already?")
    command = parse_command(claim.command, {verb: options_of(each) for verb, each in _FUNCTIONS.items()})
    if command is None:
        hint = f"run any part again: --part 0/{claim.num_parts}"
        raise UsageError("what is being written here does not say by which command", where=destination, hint=hint)
    verb, given = command
    _check_paths(verb, given, destination)
    done = _FUNCTIONS[verb](
        **given, destination=destination, part=f"0/{claim.num_parts}", only_commit=True, progress=options.progress
    )
    if not done.published:
        missing = [str(index) for index in done.waiting_for]
        again = " and ".join(f"--part {index}/{claim.num_parts}" for index in missing[:4])
        raise StorageError(
            f"part{'s' * (len(missing) > 1)} {first_few(missing, 8)} of {claim.num_parts} "
            f"{'are' if len(missing) > 1 else 'is'} missing",
            where=destination,
            hint=f"run {again} again; the others are kept",
        )
    return done


def _check_paths(verb: str, given: Mapping[str, object], destination: str) -> None:
    """Refuse to read what a bucket says should be read of this machine: whoever may write there wrote it.

    A staging directory on this machine is its owner's alone.
    """
    paths = {each.name for each in options_of(_FUNCTIONS[verb]) if each.is_path}
    own = [str(value) for name, value in given.items() if name in paths and not is_remote(str(value))]
    if own and is_remote(destination):
        raise UsageError(
            f"what is being written here reads {first_few(own)} of the machine that began it",
            where=destination,
            hint="run any part of it again there: one that is done publishes",
        )
