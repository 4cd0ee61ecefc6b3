"""`ckpt shard`, `gather`, `reshard` and `merge-lora`: what converts."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_conversion, progress_of
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.moving.threads import one_thread_each


def run(call: Call[Conversion], *, output: Output) -> int:
    """Convert, and print what was written."""
    one_thread_each()
    with progress_of(output) as factory:
        result = call(progress=factory)
    print_conversion(result, output)
    return 0
