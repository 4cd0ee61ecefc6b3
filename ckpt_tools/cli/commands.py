"""The table of commands, in the order in which --help shows them."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.cli.check_lora import check_lora
from ckpt_tools.cli.diff import diff
from ckpt_tools.cli.env import env
from ckpt_tools.cli.estimate import estimate
from ckpt_tools.cli.export_lora import export_lora
from ckpt_tools.cli.gather import gather
from ckpt_tools.cli.inspect import inspect
from ckpt_tools.cli.merge_lora import merge_lora
from ckpt_tools.cli.preflight import preflight
from ckpt_tools.cli.push import push
from ckpt_tools.cli.shard import reshard, shard
from ckpt_tools.cli.smoke import smoke
from ckpt_tools.cli.verify import verify

COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": inspect,
    "shard": shard,
    "gather": gather,
    "reshard": reshard,
    "verify": verify,
    "diff": diff,
    "smoke": smoke,
    "estimate": estimate,
    "preflight": preflight,
    "export-lora": export_lora,
    "merge-lora": merge_lora,
    "check-lora": check_lora,
    "push": push,
    "env": env,
}
"""Name → function."""
