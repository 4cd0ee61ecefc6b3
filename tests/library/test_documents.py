"""The JSON of every command is what its schema says, and what the function's result says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bin_lib import bin_modules
from library.json_schema import problems
from library.world import params

import ckpt_tools
from ckpt_tools.cli.commands import COMMANDS

(schemas,) = bin_modules("schemas")
Shown = Callable[..., tuple[int, dict[str, Any]]]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client


@pytest.fixture
def shown(world: Path, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shown:
    """Run a command with --json where the examples' files are; its exit code and document, which fits its schema."""
    monkeypatch.chdir(world)

    def call(line: str) -> tuple[int, dict[str, Any]]:
        argv = [str(tmp_path / word[1:]) if word.startswith("@") else word for word in line.split()]
        if "--" in argv:
            argv[argv.index("--") : argv.index("--")] = ["--json"]
        code, out, err = run(*argv) if "--json" in argv else run(*argv, "--json")
        document = json.loads(out or err)
        wanted = schemas.schema(argv[0] if out else "error")
        assert list(problems(document, wanted)) == []
        return code, document

    return call


CASES = [
    (0, "inspect model"),
    (0, "inspect model-dp8 --tensors"),
    (0, "inspect model --mesh fsdp=2 --tensor lm_head.weight"),
    (0, "inspect run/step-1"),
    (0, "inspect damaged"),
    (4, "inspect nowhere"),
    (0, "verify model"),
    (0, "verify model-dp8 --level values"),
    (0, "verify model-dp8 --part 0/2"),
    (0, "verify model --level structure --against model-dp8"),
    (3, "verify damaged"),
    (3, "verify incomplete"),
    (3, "verify model-dp8 damaged"),
    (4, "verify model nowhere"),
    (0, "verify run"),
    (2, "verify model --level all"),
    (0, "diff model model-dp8"),
    (3, "diff model tuned"),
    (0, "diff model tuned --keys-only"),
    (3, "diff model adapter"),
    (4, "diff model damaged"),
    (0, "stats model --rank"),
    (0, "stats tuned --against model"),
    (3, "stats tuned --against model --frozen lm_head.weight"),
    (0, "scan model"),
    (3, "scan evil"),
    (0, "estimate model --mesh 8"),
    (0, "estimate model --mesh 8 --gpu-memory 80GB --strategy all"),
    (3, "estimate --params 70B --layers 80 --hidden 8192 --mesh 1 --gpu-memory 8GB"),
    (0, "preflight train.toml --only rules"),
    (0, "preflight train.toml --no-smoke --model model --world-size 2"),
    (3, "preflight train.toml --only rules --world-size 3 -- --parallelism.tensor_parallel_degree 2"),
    (0, "smoke model --nproc 2 --steps 1"),
    (0, "shard model @a --mesh 4"),
    (0, "shard model @a --mesh 4 --dry-run"),
    (0, "shard model @a --mesh 4 --part 0/2"),
    (2, "shard model @a --mesh 4,5"),
    (5, "gather model-dp8 model"),
    (0, "gather model-dp8 @a"),
    (4, "gather damaged @a"),
    (0, "reshard model-dp8 @a --mesh 2"),
    (0, "average model tuned @a"),
    (0, "extract model @a --include lm_head.weight"),
    (0, "rename model @a --map names.txt"),
    (0, "merge-lora model adapter @a"),
    (0, "merge-lora model adapter @a -n"),
    (4, "commit @a"),
    (0, "check-lora adapter --base model"),
    (3, "check-lora adapter --for kohya --base model"),
    (0, "export-lora adapter @a"),
    (0, "export-lora adapter @a -n"),
    (3, "export-lora dead @a"),
    (0, "extract-lora model tuned @a --rank 2"),
    (0, "extract-lora model tuned @a -n"),
    (3, "extract-lora model model @a"),
    (0, "resize-lora adapter @a --rank 1"),
    (0, "push model me/model -n"),
    (0, "push model me/model"),
    (0, "watch run --status"),
    (0, "prune run --keep-last 1 -n"),
    (3, "watch bad-run --once --settle 0"),
    (0, "env"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "line"), params(CASES))
def test_document_of_a_command_is_as_its_schema_says(code: int, line: str, shown: Shown) -> None:
    found, document = shown(line)
    assert found == code, document
    assert document["schema_version"] == 1


def test_every_command_has_a_schema_and_a_case() -> None:
    assert schemas.DOCUMENTS.keys() - {"error"} == COMMANDS.keys() - {"help"}
    assert {line.split()[0] for _, line in CASES} == COMMANDS.keys() - {"help"}


_TIMES = {"seconds", "throughput_bytes_per_s", "peak_rss_bytes", "step_seconds", "peak", "memory_bytes", "left"}


def _lasting(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {name: _lasting(each) for name, each in value.items() if name not in _TIMES}
    return list(map(_lasting, value)) if isinstance(value, list) else value


SAME: dict[str, Callable[[Path], Any]] = {
    "inspect model-dp8": lambda _: ckpt_tools.inspect("model-dp8"),
    "verify damaged": lambda _: ckpt_tools.verify("damaged"),
    "verify model --level values": lambda _: ckpt_tools.verify("model", level="values"),
    "diff model tuned": lambda _: ckpt_tools.diff("model", "tuned"),
    "stats model --rank": lambda _: ckpt_tools.stats("model", rank=True),
    "scan evil": lambda _: ckpt_tools.scan("evil"),
    "estimate model --mesh 8": lambda _: ckpt_tools.estimate("model", mesh=8),
    "preflight train.toml --only rules": lambda _: ckpt_tools.preflight("train.toml", only="rules"),
    "smoke model --nproc 2 --steps 1": lambda _: ckpt_tools.smoke("model", nproc=2, steps=1),
    "gather model-dp8 @a -n": lambda here: ckpt_tools.gather("model-dp8", here / "a", dry_run=True),
    "merge-lora model adapter @a -n": lambda at: ckpt_tools.merge_lora("model", "adapter", at / "a", dry_run=True),
    "check-lora adapter": lambda _: ckpt_tools.check_lora("adapter"),
    "export-lora adapter @a -n": lambda here: ckpt_tools.export_lora("adapter", here / "a", dry_run=True),
    "push model me/other -n": lambda _: ckpt_tools.push("model", "me/other", dry_run=True),
    "watch run --status": lambda _: ckpt_tools.watch("run", status=True),
    "prune run --keep-last 1 -n": lambda _: ckpt_tools.prune("run", keep_last=1, dry_run=True),
}


@pytest.mark.parametrize("line", params(((line,) for line in SAME), pytest.mark.zoo))
def test_to_dict_is_the_document_and_truth_the_exit_code(line: str, shown: Shown, tmp_path: Path) -> None:
    code, document = shown(line)
    result = SAME[line](tmp_path)
    assert _lasting(result.to_dict()) == _lasting(document)
    assert bool(result) is (code == 0)
    assert len(repr(result).splitlines()) <= 20


def test_checkpoint_and_identity_have_the_documents_of_inspect(world: Path) -> None:
    described = ckpt_tools.open_checkpoint(world / "model-dp8").to_dict()
    assert list(problems(described, schemas.schema("inspect"))) == []
    assert len(described["tensors"]) == described["num_tensors"] == 21
    identity = ckpt_tools.identify(world / "model-dp8").to_dict()
    assert identity.items() >= ckpt_tools.inspect(world / "model-dp8").to_dict()["identity"].items()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"ok": "yes"}, "$.ok"), ({"level": "all"}, "$.level"), ({"more": 1}, "$.more"), ({"findings": [{}]}, "missing")],
)
def test_checker_notices_what_is_wrong(change: dict[str, Any], says: str, shown: Shown) -> None:
    _, document = shown("verify model")
    wrong = {**document, **change}
    assert says in " ".join(problems(wrong, schemas.schema("verify")["anyOf"][0], schemas.schema("verify")["$defs"]))
    assert list(problems(wrong, schemas.schema("verify"))) != []
