"""Configs that are made to be slow: the work is bounded by the limits, or grows with the length and no faster."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.configs.document import read_document
from ckpt_tools.preflight.configs.schema import MAX_FINDINGS
from ckpt_tools.transfer.placement import plain_yaml
from ckpt_tools.transfer.placement.plain_yaml import load_yaml

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
_COUNTED = ("ckpt_tools", "yaml", "json", "tomllib")


def calls(job: Callable[[], object]) -> Counter[str]:
    """How often each function is called, of ours and of the parsers'; not what the collector of garbage calls."""
    found: Counter[str] = Counter()

    def count(frame, event, _) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").partition(".")[0] in _COUNTED:
            found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        job()
    finally:
        sys.setprofile(before)
    return found


def calls_until(text: str, says: str) -> Counter[str]:
    """How often each is called until the text is refused."""
    errors: list[str] = []

    def job() -> None:
        try:
            load_yaml(text, full=True)
        except ValueError as error:
            errors.append(str(error))

    found = calls(job)
    assert says in errors[0]
    return found


def test_yaml_with_a_key_many_times_is_left_at_the_second() -> None:
    found = calls_until("a: 1\n" * 200_000, "the key 'a' is written twice")
    assert 0 < found["compose_node"] <= 10  # ours, and PyYAML's below it
    assert found.total() < 2000


@pytest.mark.parametrize(
    "line", ["k{}: 1\n", "- 1\n", "k{0}: &a{0} {{b: 1}}\n", "- {{<<: {{a: 1}}, b: 2}}\n", "? [a{}]\n"]
)
def test_yaml_of_too_many_values_is_left_there(line: str, monkeypatch) -> None:
    monkeypatch.setattr(plain_yaml, "MAX_NODES", 200)
    little, much = (
        calls_until("".join(line.format(i) for i in range(count)), "more than 200 values") for count in (300, 30_000)
    )
    assert 200 < little["compose_node"] <= 402  # ours, and PyYAML's below it
    assert little == much


@pytest.mark.full
def test_yaml_that_is_nested_too_deep_is_left_there() -> None:
    found = calls_until("[" * 100_000, "inside one another")
    assert plain_yaml.MAX_DEPTH < found["compose_node"] <= 2 * (plain_yaml.MAX_DEPTH + 2)


def test_yaml_keys_that_come_again_elsewhere_or_are_merged_are_no_duplicates() -> None:
    text = "a: &x {a: {a: 1}, b: [{a: 2}, {a: 3}]}\nc:\n  <<: *x\n  <<: {d: 1, a: 4}\n  b: 5\n'<<': {a: 1}\n"
    assert load_yaml(text, full=True) == {
        "a": {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]},
        "c": {"a": {"a": 1}, "b": 5, "d": 1},
        "<<": {"a": 1},
    }


@pytest.mark.parametrize(
    "text", ["a: 1\n'a': 2", "a: {b: 1, c: 2, b: 3}", "'<<': 1\n\"<<\": 2", "? &x a\n: 1\n? *x\n: 2"]
)
@pytest.mark.parametrize("full", [True, False])
def test_yaml_key_that_is_written_twice_is_refused(text: str, full: bool) -> None:
    with pytest.raises(ValueError, match="is written twice"):
        load_yaml(text, full=full)


def test_merged_mappings_are_those_of_pyyaml() -> None:
    text = "a: &x {k: 1, l: 2}\nb: &y {l: 3, m: 4}\nc: {<<: [*x, *y], m: 5}\nd: {<<: *y, l: 6}\n"
    assert load_yaml(text, full=True) == yaml.safe_load(text)


class Key(str):
    """Counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return str.__eq__(self, other)


def test_json_key_that_is_written_twice_is_found_in_one_pass(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.json").write_text("{" + "".join(f'"k{i}": 1, ' for i in range(3000)) + '"k2999": 2}')
    loads = json.loads

    def with_keys(text: str, object_pairs_hook) -> object:
        return loads(text, object_pairs_hook=lambda pairs: object_pairs_hook([(Key(k), v) for k, v in pairs]))

    monkeypatch.setattr(json, "loads", with_keys)
    Key.compared = 0
    with pytest.raises(UnreadableError, match="'k2999' is written twice"):
        read_config(str(tmp_path / "a.json"))
    assert Key.compared < 30_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "base_model: m\nadapter: lora\n" + "".join(f"lora_xx{i}: 1\n" for i in range(2000))),
        ("a.yaml", ACCELERATE + "fsdp_config:\n" + "".join(f"  fsdp_xx{i}: 1\n" for i in range(2000))),
        ("a.sh", "deepspeed --module openrlhf.cli.train_sft " + " ".join(f"--max_epoch{i} 1" for i in range(2000))),
    ],
    ids=["axolotl", "accelerate", "openrlhf"],
)
def test_names_are_compared_for_as_many_findings_as_are_said(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    configs = []
    found = calls(lambda: configs.append(read_config(str(tmp_path / name))))
    unknown = [finding for finding in configs[0].findings if finding.code == "unknown-key"]
    assert len(unknown) == 1
    assert 0 < found["nearest"] <= MAX_FINDINGS + 1


@pytest.mark.parametrize("text", ["a" + ".a" * 20_000 + " = 1\n", "[a" + " . a" * 20_000 + "]\n"])
def test_toml_keys_of_too_many_parts_are_refused_before_they_are_parsed(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)

    def job() -> None:
        with pytest.raises(LimitError, match="dots"):
            read_config(str(tmp_path / "a.toml"))

    assert calls(job)["parse_key"] == 0


@pytest.mark.full
def test_work_on_a_script_grows_with_its_length_and_no_faster(tmp_path: Path) -> None:
    def work(text: str) -> int:
        (tmp_path / "a.sh").write_text(text)
        return calls(lambda: read_document(str(tmp_path / "a.sh"))).total()

    for unit in (
        "'x' ",
        "x'y'\"z\" ",
        '$(a "$(b)") ',
        "A=(a b c)\n",
        "X=a\necho $X ${Y:-b} $((X * 2))\n",
        "f() {\n:\n}\n",
    ):
        assert 0 < work(unit * 400) <= 2.2 * work(unit * 200)
