"""`ckpt shard`, `gather`, `reshard` and `merge-lora`: what converts."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_conversion, progress_of
from ckpt_tools.conversions.job import Conversion


def run(call: Call[Conversion], *, output: Output) -> int:
    """Convert, and print what was written."""
    with progress_of(output) as factory:
        result = call(progress=factory)
    print_conversion(result, output)
    return 0
