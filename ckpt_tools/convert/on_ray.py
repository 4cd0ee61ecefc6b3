"""`--on ray`: every part of a conversion is a task of a Ray cluster, and one whose node is lost is run on another.

ckpt, the source and the destination must be there on every node. Ray moves no bytes: a task gets the options and which
part it is, and returns what came of it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.convert.job import Conversion
from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.options import options_of
from ckpt_tools.sandbox.wire import error_from_json, error_to_json
from ckpt_tools.storage.locations import absolute

MAX_LOSSES = 5  # How often a part is run again after the process or the node that ran it was lost
_CPUS = 2


def convert_on_ray(
    function: Callable[..., Conversion],
    given: Mapping[str, Any],
    *,
    on: str,
    num_parts: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Run all parts of a conversion (`shard`, `gather` or `reshard`) as tasks, and wait for them.

    `on` is "ray" for the cluster that RAY_ADDRESS names or this machine belongs to, or ray://HOST:PORT. By default
    there is one part for every two CPUs of the cluster. Return what the part that published returned, with the bytes
    that all have read.
    """
    ray = _find_ray()
    if on != "ray" and not on.startswith("ray://"):
        raise UsageError(f"--on takes ray or ray://HOST:PORT, got {on!r}")
    paths = {each.name for each in options_of(function) if each.is_path}
    options = {name: absolute(os.fspath(value)) if name in paths else value for name, value in given.items()}
    joins = not ray.is_initialized()
    if joins:
        _join(ray, on)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        count = num_parts or max(1, cpus // _CPUS)
        spread = {"max_retries": MAX_LOSSES, "num_cpus": min(_CPUS, cpus), "scheduling_strategy": "SPREAD"}
        task = ray.remote(_run_part).options(**spread)
        waiting = [task.remote(function.__name__, options, index, count) for index in range(count)]
        results: list[Conversion] = []
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            results.append(_take(ray, done[0], waiting))
            say(f"{len(results)} of {count} parts are done")
    finally:
        if joins:
            ray.shutdown()
    published = next((result for result in results if result.published), None)
    if published is None:
        raise CkptError("every part is done, but none has published", hint="run the same command again")
    return replace(published, bytes_read=sum(result.bytes_read for result in results))


def _find_ray() -> Any:  # noqa: ANN401 - a module that may be missing
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("--on ray needs Ray", hint="pip install 'ckpt-tools[ray]'") from error


def _join(ray: Any, on: str) -> None:  # noqa: ANN401 - a module
    address = on if on != "ray" else os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        what = f"no Ray cluster can be joined: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        hint = "start one (ray start --head), set RAY_ADDRESS, or name it: --on ray://HOST:10001"
        raise UsageError(what, where=address, hint=hint) from error


def _take(ray: Any, done: Any, waiting: list[Any]) -> Conversion:  # noqa: ANN401 - Ray's own
    try:
        result = ray.get(done)
    except ray.exceptions.RayError as error:
        what = f"a part was lost {1 + MAX_LOSSES} times, or could not be started: {type(error).__name__}"
        hint = "what the other parts have written is kept: the same command continues from there"
        failure: CkptError = StorageError(what, hint=hint)
    else:
        if isinstance(result, Conversion):
            return result
        failure = error_from_json(result)
    for each in waiting:
        ray.cancel(each)
    raise failure


def _run_part(name: str, options: Mapping[str, Any], index: int, count: int) -> Conversion | dict[str, str | None]:
    """Do one part, on whichever node this is; return what came of it, or the error as a document."""
    from ckpt_tools.convert import commands

    try:
        result: Conversion = getattr(commands, name)(**options, part=f"{index}/{count}")
    except CkptError as error:
        return error_to_json(error)
    return result
