"""Configs with anything in them: a config or a clear refusal, and no trainer is imported."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from preflight.config_examples import EXAMPLES, FIXTURES
from samples import examples

from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.preflight.configs import read_config

# Anything at all

RLHF = "torchrun --nproc_per_node=8 -m openrlhf.cli.train_sft "
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2 "
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-2, max_value=9),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["$X", "${a.b}", "${a}", "fsdp2", "FULL_SHARD", "auto", "-1", "1e9999", "[", "{a:1}"]),
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(node: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path] + [place for key, value in items for place in places(value, (*path, key))]


MAPPINGS = {
    name: copy.deepcopy(dict(read_config(str(FIXTURES / name)).values))
    for name in EXAMPLES
    if not name.startswith("openrlhf")
}


@pytest.mark.parametrize("name", MAPPINGS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_gives_a_config_or_a_clear_refusal(name: str, data: st.DataObject, tmp_path: Path) -> None:
    values: Any = copy.deepcopy(MAPPINGS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(places(values)[1:]))
        node = values
        for part in parents:
            node = node[part]
        node[last] = data.draw(ANYTHING)
        if not places(values)[1:]:
            break
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    try:
        config = read_config(
            str(path), framework=EXAMPLES[name][0], world_size=data.draw(st.sampled_from([None, 1, 8, 12]))
        )  # type: ignore[arg-type]
    except UnreadableError:
        return
    spec = config.spec
    if spec.mesh is not None and spec.world_size is not None and spec.engine != "other":
        assert spec.mesh.world_size == spec.world_size
    for finding in config.findings:
        assert (finding.where + finding.what + str(finding.hint)).isprintable()


@pytest.mark.full
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.one_of(
            st.text(max_size=10),
            st.sampled_from([*"'\"\\$#;|<>&", "--zero_stage", "--max_len", "3", "\\\n", "\n", "a.b=c"]),
        ),
        max_size=12,
    )
)
def test_any_words_after_a_command_give_a_config_or_a_clear_refusal(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    for begin in (RLHF, VERL):
        path.write_bytes((begin + " ".join(words)).encode("utf-8", "surrogatepass"))
        try:
            config = read_config(str(path))
        except (UnreadableError, UsageError):
            continue
        for finding in config.findings:
            assert (finding.where + finding.what + str(finding.hint)).isprintable()


def test_reading_configs_imports_no_trainer_and_help_no_pydantic() -> None:
    code = (
        "import sys; from ckpt_tools.preflight.configs import read_config; "
        f"[read_config(path) for path in {[str(FIXTURES / name) for name in EXAMPLES]!r}]; "
        "trainers = {'torch', 'transformers', 'accelerate', 'axolotl', 'verl', 'omegaconf', 'typer'}; "
        "assert not trainers & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys; import ckpt_tools.preflight.rules, ckpt_tools.preflight.spec; "
        "from ckpt_tools.cli import main; main(['--help']); assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
