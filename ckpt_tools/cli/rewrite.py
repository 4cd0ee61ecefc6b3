"""`ckpt merge-lora`, `average`, `extract` and `rename`: what is written anew in one run."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.convert import convert
from ckpt_tools.cli.output import Output
from ckpt_tools.conversions.job import Conversion


def run(call: Call[Conversion], *, output: Output) -> int:
    """Merge, and print what was written."""
    return convert(call, output)
