"""Every rule fires on a config that breaks it, and is silent on one that nearly does."""

from __future__ import annotations

import functools
import json
import math
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preflight.mistakes import MISTAKES
from preflight.rule_cases import (
    BIG,
    CASES,
    DEGREE,
    LLAMA,
    MIXTRAL,
    NAMES,
    RIGHT,
    SHARD,
    TIED,
    WRONG,
    Edits,
    RuleCase,
    edited,
    text_of,
)

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UnreadableError
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.match import look_at_model
from ckpt_tools.preflight.model_facts import ModelFacts, Quantization, facts_of, read_facts
from ckpt_tools.preflight.rules import CATALOGUE, RULES, check_rules
from ckpt_tools.preflight.spec import ParallelSpec


def write_model(
    directory: Path, config: Mapping[str, Any], weights: Mapping[str, tuple[int, ...]] | None = None
) -> str:
    """Write a config.json and, where shapes are given, a safetensors file of zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if weights:
        header, offset = {}, 0
        for name, shape in weights.items():
            nbytes = math.prod(shape) * 4
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(header).encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return str(directory)


def check(
    tmp_path: Path,
    framework: str,
    edits: Edits,
    *,
    world_size: int | None = 8,
    model: Mapping[str, Any] | None = None,
    weights: Mapping[str, tuple[int, ...]] | None = None,
    build: bool = False,
) -> tuple[Finding, ...]:
    path = tmp_path / NAMES[framework]
    path.write_text(text_of(framework, edited(framework, edits), ranks=world_size))
    config = read_config(str(path), framework=framework, world_size=world_size)
    facts = None
    if model is not None:
        directory = write_model(tmp_path / "the-model", model, weights)
        facts = replace(built(json.dumps([model, weights])), where=directory) if build else read_facts(directory)
    return check_rules(config, facts)


@functools.cache
def built(model_and_weights: str) -> ModelFacts:
    """What a child finds when it builds the model: once for all cases that have the same one."""
    with tempfile.TemporaryDirectory() as root:
        facts = look_at_model(write_model(Path(root, "model"), *json.loads(model_and_weights))).facts
    assert facts is not None
    return facts


def ids(findings: tuple[Finding, ...]) -> list[str]:
    return sorted({finding.code for finding in findings})


def name_of(case: RuleCase) -> str:
    return f"{case.rule}-{case.framework}"


READ: dict[str, Any] = {"unread": frozenset(), "unread_fields": frozenset(), "hides_options": False, "contents": {}}
"""Of a config in which nothing is left to variables."""


def with_builds_in_full(but: str) -> list[Any]:
    """Cases for whose model a child imports transformers are left to the whole run, but for one."""
    leave = [case.build and name_of(case) != but for case in CASES]
    return [
        pytest.param(case, id=name_of(case), marks=pytest.mark.full if left else ())
        for case, left in zip(CASES, leave, strict=True)
    ]


@pytest.mark.parametrize("case", with_builds_in_full(but="CKPT040-accelerate"))
def test_rule_on_a_config_that_breaks_it_fires_alone(case: RuleCase, tmp_path: Path) -> None:
    found = check(
        tmp_path,
        case.framework,
        case.fires,
        world_size=case.world_size,
        model=case.model,
        weights=case.weights,
        build=case.build,
    )
    assert ids(found) == sorted({case.rule, *case.also}), found
    for finding in found:
        assert finding.severity == CATALOGUE[finding.code].severity
        assert finding.where
        assert finding.what
        assert finding.hint


@pytest.mark.parametrize("case", with_builds_in_full(but=""))
def test_rule_on_a_near_miss_is_silent(case: RuleCase, tmp_path: Path) -> None:
    found = check(
        tmp_path,
        case.framework,
        case.near,
        world_size=case.near_world_size or case.world_size,
        model=case.near_model or case.model,
        weights=case.weights if case.near_weights is None else case.near_weights,
        build=case.build,
    )
    assert ids(found) == sorted(case.near_also), found


def test_rules_all_have_a_case() -> None:
    mistakes = {one.code for one in MISTAKES if one.code.startswith("CKPT")}
    assert {case.rule for case in CASES} | mistakes == set(CATALOGUE)


def test_rules_ids_are_unique_and_ordered_in_their_groups() -> None:
    assert len(CATALOGUE) == len(RULES)
    names = [one.id for one in RULES]
    assert names == sorted(names)


@pytest.mark.parametrize("framework", sorted(RIGHT))
def test_right_config_has_no_findings(framework: str, tmp_path: Path) -> None:
    assert check(tmp_path, framework, {}, model=LLAMA) == ()


@pytest.mark.full
@pytest.mark.parametrize("framework", ["accelerate", "axolotl", "trainer"])
def test_right_config_with_a_built_model_has_no_findings(framework: str, tmp_path: Path) -> None:
    assert check(tmp_path, framework, {}, model=LLAMA, build=True) == ()


MESH = {
    "accelerate": "dp_replicate dp_shard cp tp",
    "trainer": "dp_replicate dp_shard cp tp pp",
    "torchtitan": "pp dp_replicate dp_shard cp tp",
    "axolotl": "ep dp_replicate dp_shard cp tp",
    "ai-toolkit": "dp_replicate dp_shard",
    "verl": "pp dp_replicate dp_shard cp tp",
    "openrlhf": "dp_replicate dp_shard sp cp tp",
    "deepspeed": "dp_replicate dp_shard tp",
}
"""Axes whose product is the number of ranks, as each trainer builds its mesh."""


@pytest.mark.parametrize("framework", MESH)
def test_every_axis_of_a_mesh_takes_ranks_and_no_other_does(framework: str, tmp_path: Path) -> None:
    (path := tmp_path / NAMES[framework]).write_text(text_of(framework, RIGHT[framework]))
    config = read_config(str(path), world_size=8)
    for axis in ("dp_replicate", "dp_shard", "sp", "cp", "tp", "pp", "ep"):
        spec = replace(config.spec, world_size=8, axes={"dp_shard": 4, "dp_replicate": 2, axis: 3})
        found = [each.code for each in check_rules(replace(config, spec=spec), ModelFacts(where="config.json"))]
        assert ("CKPT001" in found) == (axis in MESH[framework].split()), axis


@pytest.mark.parametrize(("framework", "edits", "model", "expected"), WRONG)
def test_wrong_config_breaks_exactly_the_expected_rules(
    framework: str, edits: Edits, model: Any, expected: list[str], tmp_path: Path
) -> None:
    assert ids(check(tmp_path, framework, edits, model=model)) == expected


# Messages


@pytest.mark.full
def test_wrap_class_that_is_misspelt_gets_the_nearest_name(tmp_path: Path) -> None:
    edits = {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": "LlamaDecodrLayer"}
    (found,) = check(tmp_path, "accelerate", edits, model=LLAMA, build=True)
    assert found.where == "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
    assert "LlamaDecodrLayer" in found.what
    assert found.hint == "write LlamaDecoderLayer"


def test_axis_product_names_the_key_and_a_size_that_fits(tmp_path: Path) -> None:
    (found,) = check(tmp_path, "torchtitan", {SHARD: 3, DEGREE("tensor"): 2})
    assert found.where == SHARD
    assert "dp_shard=3 × tp=2 is 6, but there are 8 ranks" in found.what
    assert found.hint == f"set {SHARD}: 4, or start 6 ranks"


@pytest.mark.full
def test_full_state_dict_of_a_large_model_says_how_much_is_gathered(tmp_path: Path) -> None:
    edits = {"fsdp_config.fsdp_state_dict_type": "FULL_STATE_DICT"}
    (found,) = check(tmp_path, "accelerate", edits, model=BIG, build=True)
    assert "80.9 GB" in found.what or "75.3 GiB" in found.what  # 6.738 billion × 12 bytes


def test_values_of_a_hostile_config_are_escaped(tmp_path: Path) -> None:
    edits = {"fsdp_config.fsdp_auto_wrap_policy": "\x1b[2Jgone"}
    (found,) = check(tmp_path, "accelerate", edits)
    assert "\x1b" not in found.what + found.where + (found.hint or "")


def test_uneven_shards_say_how_uneven(tmp_path: Path) -> None:
    weights = {"layers.0.experts.gate_up_proj": (8, 128, 64)}
    found = check(tmp_path, "accelerate", {"num_processes": 64}, world_size=64, model=MIXTRAL, weights=weights)
    (one,) = [finding for finding in found if finding.code == "CKPT043"]
    assert "8.0 times the mean" in one.what
    assert one.hint == "at most 8 shard ranks; the others as dp_replicate"


# Facts


def test_facts_come_from_the_config_alone_without_torch(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", LLAMA)
    code = (
        "import sys; from ckpt_tools.preflight.model_facts import read_facts;"
        "from ckpt_tools.preflight.rules import check_rules;"
        f"facts = read_facts({path!r});"
        "print(facts.num_heads, facts.num_kv_heads, facts.blocks, facts.module_classes);"
        "assert not {'torch', 'transformers', 'accelerate', 'typer'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "8 4 ('LlamaDecoderLayer',) None\n"


@pytest.mark.full
def test_facts_of_a_built_model_are_its_own(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = write_model(tmp_path / "model", TIED)
    model = LlamaForCausalLM(LlamaConfig(**TIED))
    facts = look_at_model(path).facts
    assert facts is not None
    assert facts.shapes == {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert facts.module_classes is not None
    assert set(facts.module_classes) == {type(one).__name__ for one in model.modules()}
    assert facts.blocks == tuple(model._no_split_modules)
    assert facts.tied_embeddings is True
    assert facts.num_params == sum(one.numel() for one in model.parameters())


def test_facts_of_weights_beside_the_config_come_from_their_headers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", LLAMA, {"a.weight": (3, 5), "b": (7,)})
    facts = read_facts(path)
    assert facts.shapes == {"a.weight": (3, 5), "b": (7,)}
    assert facts.stored == {"a.weight", "b"}
    assert facts.num_params == 22


def test_facts_of_parts_are_those_of_the_text_model() -> None:
    facts = facts_of({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": LLAMA})
    assert (facts.num_heads, facts.num_kv_heads, facts.num_layers, facts.vocab_size) == (8, 4, 4, 256)
    assert facts.architecture == "LlavaForConditionalGeneration"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_head": 12, "n_layer": 6, "n_embd": 48, "model_type": "gpt2"}, (12, 12, 6, None)),
        ({"num_attention_heads": 71, "multi_query": True, "num_hidden_layers": 2}, (71, 1, 2, None)),
        ({"num_attention_heads": 8, "n_routed_experts": 64, "num_hidden_layers": 3}, (8, 8, 3, 64)),
        ({"num_attention_heads": "8", "num_hidden_layers": -1, "num_experts": True}, (None, None, None, None)),
    ],
)
def test_facts_read_every_familys_names(config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    facts = facts_of(config)
    assert (facts.num_heads, facts.num_kv_heads, facts.num_layers, facts.num_experts) == expected


def test_facts_of_quantised_weights_are_recognised() -> None:
    facts = facts_of({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}})
    assert facts.quantization == Quantization(method="bitsandbytes", bits=4, storage="bfloat16")


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}', "{" * 10_000, "\xff\xfe"])
def test_facts_of_a_broken_config_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnreadableError):
        read_facts(str(tmp_path))


def test_facts_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"no config\.json"):
        read_facts(str(tmp_path))


def test_facts_of_an_unknown_model_are_those_of_its_config(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", LLAMA | {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"})
    facts = read_facts(path)
    assert facts.num_heads == 8
    assert facts.module_classes is None


# Documentation


def test_rules_of_the_catalogue_say_why_and_what_to_do() -> None:
    for one in RULES:
        assert one.title
        assert one.why
        assert one.fix
        assert not one.title.endswith(".")
        assert not one.why.endswith(".")
        assert not one.fix.endswith(".")


def test_facts_default_to_knowing_nothing(tmp_path: Path) -> None:
    for framework in RIGHT:
        path = tmp_path / NAMES[framework]
        path.write_text(text_of(framework, edited(framework, {})))
        config = read_config(str(path), framework=framework, world_size=8)
        assert check_rules(config, ModelFacts(where="nothing")) == ()


# Values that nobody expects


ODD: tuple[object, ...] = (None, "", "x", "-1", -1, 0, 3.5, 10**30, True, False, [], [1, None], {}, {"a": [1]}, "fp16")


def paths_of(values: object, prefix: str = "") -> list[str]:
    if isinstance(values, dict):
        found = [] if not prefix else [prefix]
        for key, value in values.items():
            found += paths_of(value, f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return paths_of(values[0], f"{prefix}[0]")
    return [prefix]


def read_by_rules(framework: str) -> list[str]:
    """Return every option that a case of a framework sets."""
    return sorted({path for case in CASES if case.framework == framework for path in (*case.fires, *case.near)})


@pytest.mark.parametrize("framework", sorted(RIGHT))
def test_rules_on_values_of_any_type_never_fail(framework: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES[framework]
    path.write_text(text_of(framework, edited(framework, {})))
    spec = read_config(str(path), framework=framework, world_size=8).spec
    facts = facts_of(MIXTRAL | {"tie_word_embeddings": True})
    for option in sorted({*paths_of(RIGHT[framework]), *read_by_rules(framework)}):
        for value in ODD:
            try:
                values = edited(framework, {option: value})
            except (AttributeError, TypeError, KeyError):
                continue
            config = SimpleNamespace(framework=framework, values=values, spec=spec, **READ)
            for finding in check_rules(config, facts):
                assert finding.what
                assert finding.hint
                assert finding.code in CATALOGUE


@pytest.mark.full
@pytest.mark.parametrize("framework", sorted(RIGHT))
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "sp", "tp", "ep", "pp"])
def test_rules_on_any_size_of_an_axis_never_fail(framework: Any, axis: str) -> None:
    facts = facts_of(MIXTRAL | {"tie_word_embeddings": True})
    for engine in ("fsdp2", "fsdp1", "ddp", "deepspeed", "none"):
        for size in (-7, -1, 0, 1, 3, 8, 10**20):
            for world_size in (None, 1, 8):
                spec = ParallelSpec(
                    framework=framework,
                    engine=engine,
                    world_size=world_size,
                    axes={axis: size, "dp_shard": 2} if axis != "dp_shard" else {axis: size},
                )
                check_rules(SimpleNamespace(framework=framework, values=RIGHT[framework], spec=spec, **READ), facts)


FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in FIXTURES.rglob("*.*") if path.name != "fsdp.json"),  # a part of args.json
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_configs_after_the_public_documentation_have_no_errors(path: Path) -> None:
    config = read_config(str(path))
    assert [finding for finding in check_rules(config) if finding.severity == "error"] == []
