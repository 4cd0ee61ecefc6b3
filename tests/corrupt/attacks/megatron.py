"""Attacks through a step of Megatron's: what stands in its `.metadata` beside torch's own, and its two small files."""

from __future__ import annotations

import json
import pickle

from corrupt.attacks.opcodes import PROTO, call, dict_of, list_of, name, number, text, tuple_of, write_run
from corrupt.attacks.pickles import NOT_EXECUTED, Payload
from corrupt.attacks.recipe import Case, add, carried, harmless
from corrupt.attacks.zips import archive

BACKEND = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
MCORE = "megatron.core.dist_checkpointing.strategies.torch"


def step(case: Case, *, config: str = BACKEND, common: bytes | None = None, **fields: bytes) -> None:
    """A step with one tensor."""
    write_run(case.source, **fields)
    (case.source / "metadata.json").write_text(config)
    if common is not None:
        (case.source / "common.pt").write_bytes(common)


def _common(title: str, tries: str, pickled, codes=None) -> None:
    def build(case: Case) -> None:
        step(case, common=archive(entries=[("common/data.pkl", pickled(case)), ("common/version", b"3\n")]))

    add(f"megatron-{title}", tries, build, carried() if codes is None else codes)


_common("common-exploit", "common.pt calls os.system", lambda case: pickle.dumps({"args": Payload(case.shell)}, 2),
    carried(mesh=4))  # fmt: skip
_common(
    "common-args",
    "the arguments in common.pt are a program, and so is one of them",
    lambda case: (
        PROTO
        + dict_of((text("args"), call(name("argparse", "Namespace")) + dict_of((text("a"), shell(case))) + b"b"))
        + b"."
    ),
    carried(mesh=4),
)
_common("common-number", "common.pt is a number", lambda case: PROTO + number(1) + b".", harmless())


def shell(case: Case) -> bytes:
    """The opcodes that would run a command."""
    return call(name("os", "system"), text(case.shell))


ANY_PLANS = {"all_local_plans": dict_of((text("x"), tuple_of(number(1)))), "mcore_data": list_of(number(1))}
STRANGE = json.dumps({"sharded_backend": "\x1b[2J\u202e", "sharded_backend_version": [1]})
# fmt: off
add("megatron-common-bare", "common.pt is a bare pickle that calls os.system",
    lambda case: step(case, common=pickle.dumps(Payload(case.shell), 2)), carried(mesh=4))
add("megatron-plans", "a plan of Megatron's in .metadata calls os.system",
    lambda case: step(case, all_local_plans=list_of(shell(case))), words=NOT_EXECUTED)
add("megatron-plan-class", "a class of Megatron's that plans do not need",
    lambda case: step(case, all_local_plans=call(name(MCORE, "TorchDistSaveShardedStrategy"))), words=NOT_EXECUTED)
add("megatron-plans-of-anything", "plans that are no plans: nobody reads them", lambda case: step(case, **ANY_PLANS),
    {**harmless(), "structure": (3,), "data": (3,), "mesh": (4,)})
add("megatron-config-deep", "a metadata.json nested without end", lambda case: step(case, config="[" * 50_000))
add("megatron-config-long", "a metadata.json of megabytes",
    lambda case: step(case, config=json.dumps({"sharded_backend": "x" * (1 << 21)})))
add("megatron-backend", "a backend whose name drives the terminal", lambda case: step(case, config=STRANGE),
    words="which ckpt does not know")
# fmt: on
