"""`ckpt shard`, `gather`, `reshard` and `merge-lora`: what converts."""

from __future__ import annotations

import os
from typing import Annotated

from ckpt_tools.api.parts import PartsFrom, find_part
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_conversion, progress_of
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.options import Option


def run(
    call: Call[Conversion],
    *,
    output: Output,
    parts: Annotated[
        PartsFrom,
        Option("What says in the environment which part this process is (auto: torchrun, if it runs).", after="part"),
    ] = "auto",
) -> int:
    """Convert, and print what was written."""
    if call.given.get("engine") == "dtensor" and parts == "auto":  # its processes are ranks
        parts = "none"
    part = None if "part" in call.given else find_part(os.environ, parts)
    return convert(call, output, **({} if part is None else {"part": str(part)}))


def convert(call: Call[Conversion], output: Output, **more: str) -> int:
    """Make the call, and print what was written."""
    one_thread_each()
    with progress_of(output) as factory:
        result = call(progress=factory, **more)
    print_conversion(result, output)
    return 0
