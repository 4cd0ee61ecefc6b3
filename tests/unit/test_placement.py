"""Rules: patterns, files, `--set`, styles, plans, and the cuts that are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata

import pytest
from hypothesis import given, settings, strategies as st
from samples import examples

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.globs import NameIndex, compile_glob
from ckpt_tools.checkpoint.layout import Box, Mesh, Replicate, Shard
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import is_older
from ckpt_tools.sandbox.audit import Sandbox, in_sandbox
from ckpt_tools.transfer.placement.place import cut_entry, parse_rules, parse_set, place_tensors
from ckpt_tools.transfer.placement.rule import STYLES, Rule
from ckpt_tools.transfer.placement.tp_plan import (
    LLAMA_FAMILY,
    TpPlan,
    _built_in_plan,
    check_quantization,
    find_tp_plan,
    import_model_class,
    tp_plan_rules,
)

S0, S1, R = Shard(0), Shard(1), Replicate()
_PLANS_OF = (5, 23)
todays_plans = pytest.mark.skipif(
    is_older(metadata.version("transformers"), _PLANS_OF), reason="older transformers word their plans otherwise"
)

FSDP_TP = Mesh((("dp_shard", 2), ("tp", 2)))
FSDP = Mesh((("dp_shard", 4),))


def tensor(fqn, *shape, dtype="F32"):
    chunk = Chunk(box=Box((0,) * len(shape), shape), span=ByteSpan(file="m.safetensors", offset=0, nbytes=0))
    return TensorEntry(fqn=fqn, dtype=BY_NAME[dtype], shape=shape, chunks=(chunk,))


# Patterns


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a.*.c", ["a.b.c", "a..c", "a.0.c"], ["a.b.b.c", "a.c", "xa.b.c"]),
        ("a.**.c", ["a.b.c", "a.b.b.c", "a..c"], ["a.c", "a.b.d"]),
        ("**norm**", ["norm", "model.norm.weight", "layers.0.input_layernorm.weight"], ["nor.m", ""]),
        ("**.weight", ["a.weight", "a.b.weight"], ["weight", "a.weight.b"]),
        ("**", ["", "a.b"], []),
        ("*", ["", "ab"], ["a.b"]),
        ("***", ["a.b"], []),
        ("l.?", ["l.1"], ["l.", "l.12", "l.."]),
        ("{q,k}_proj", ["q_proj", "k_proj"], ["v_proj", "q,k_proj"]),
        ("{a,b{c,d}}.w", ["a.w", "bc.w", "bd.w"], ["b.w", "c.w"]),
        ("{,model.}norm", ["norm", "model.norm"], ["x.norm"]),
        ("{*,**.x}", ["ab", "a.b.x"], ["a.b"]),
        ("a,b", ["a,b"], ["a", "b"]),
        ("[ab]", ["[ab]"], ["a"]),
        ("a+b(c)|d^$\\e", ["a+b(c)|d^$\\e"], ["aab"]),
        ("a.b", ["a.b"], ["axb", "a.b\n", "a.bc"]),
        ("**a*b", ["aX.ab", "ab"], ["a.b"]),
        ("**{abcd,b}**c", ["abc", "xabcdc"], ["abd"]),
        ("**\n", ["a\n"], ["a"]),
    ],
)
def test_compile_glob_pattern_matches_what_it_says(pattern, yes, no):
    compiled = compile_glob(pattern)
    assert [name for name in yes if not compiled.fullmatch(name)] == []
    assert [name for name in no if compiled.fullmatch(name)] == []


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a,{b}", "}{", "{{}"])
def test_compile_glob_unbalanced_braces_are_refused(pattern):
    with pytest.raises(UsageError, match="without its counterpart"):
        compile_glob(pattern)


def test_compile_glob_exploding_braces_are_refused():
    with pytest.raises(UsageError, match="more than 4096"):
        compile_glob("{a,b,c,d}" * 7)


def naive(pattern):
    """The meaning of a pattern without braces, written down without care for speed."""
    parts = re.split(r"(\*{2,}|\*|\?)", pattern)
    meaning = {"*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(meaning.get(p, ".*" if p.startswith("**") else re.escape(p)) for p in parts), re.DOTALL)


@given(st.text("ab.*?", max_size=9), st.lists(st.text("ab.", max_size=9), min_size=20, max_size=20))
@settings(deadline=None, max_examples=examples(500))
def test_compile_glob_any_pattern_equals_the_plain_regular_expression(pattern, names):
    for name in names:
        assert bool(compile_glob(pattern).fullmatch(name)) == bool(naive(pattern).fullmatch(name)), name
    index, meant = NameIndex({name: (name,) for name in names}), naive(pattern).fullmatch
    assert index.find(pattern) == {name for name in names if meant(name)}
    inside = {name for name in names if "." in name and meant(name.rpartition(".")[0])}
    assert index.find(pattern, modules=True) == index.find(pattern) | inside


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["**a" * 30 + "b", "*a" * 30 + "b", "{*a,a*}**" * 6 + "b", "a*" * 30 + ".b"])
def test_compile_glob_hostile_name_is_matched_at_once(pattern):
    assert not compile_glob(pattern).fullmatch("a" * 2000)  # what goes back and forth takes for ever


# Files

LAUGHS = "version: 1\na: &a0 [x, x]\n" + "".join(f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
RULES = """
version: 1
mesh: {ddp: 2, dp_shard: 4, tp: 2}
rules:
  - match: "model.layers.*.self_attn.{q,k,v}_proj.weight"
    place: {tp: S(0), fsdp: S(1)}
  - match: "model.layers.*.self_attn.o_proj"
    style: rowwise
  - match: "**norm**"
    place: {}
"""


def test_parse_rules_example_gives_mesh_and_rules_in_order():
    parsed = parse_rules(RULES, where="rules.yaml")
    assert parsed.mesh == Mesh((("dp_replicate", 2), ("dp_shard", 4), ("tp", 2)))
    assert [(rule.place, rule.style, rule.origin) for rule in parsed.rules] == [
        ({"tp": S0, "dp_shard": S1}, None, "rules.yaml, rule 1"),
        (None, "rowwise", "rules.yaml, rule 2"),
        ({}, None, "rules.yaml, rule 3"),
    ]


def test_parse_rules_minus_one_takes_the_world_size():
    text = "version: 1\nmesh: {dp_shard: -1, tp: 2}"
    assert parse_rules(text, where="r", world_size=8).mesh == Mesh((("dp_shard", 4), ("tp", 2)))
    with pytest.raises(UsageError, match="needs --world-size"):
        parse_rules(text, where="r")


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("", "must be a mapping", None),
        ("- a", "must be a mapping", None),
        ("version: 1\nrules: [", "not valid YAML", None),
        ("version: 2", "version 2, expected 1", None),
        ("version: true", "version True, expected 1", None),
        ("rules: []", "no version, expected 1", None),
        ("version: 1\nrule: []", "unknown key 'rule'", "did you mean rules"),
        ("version: 1\nrules: {}", "rules must be a list", None),
        ("version: 1\nrules: [a]", "a rule must be a mapping", None),
        ("version: 1\nrules: [{match: a, plcae: {}}]", "unknown key 'plcae'", "did you mean place"),
        ("version: 1\nrules: [{place: {}}]", "needs match", None),
        ("version: 1\nrules: [{match: 3, place: {}}]", "needs match", None),
        ("version: 1\nrules: [{match: a}]", "either place or style", None),
        ("version: 1\nrules: [{match: a, place: {}, style: colwise}]", "either place or style", None),
        ("version: 1\nrules: [{match: a, place: }]", "place must be a mapping", None),
        ("version: 1\nrules: [{match: a, place: {tpp: R}}]", "unknown mesh axis 'tpp'", "did you mean tp"),
        ("version: 1\nrules: [{match: a, place: {tp: S(x)}}]", "is not a placement", "write S"),
        ("version: 1\nrules: [{match: a, place: {tp: 0}}]", "is not a placement", "write S"),
        ("version: 1\nrules: [{match: a, place: {fsdp: R, dp_shard: R}}]", "placed twice", None),
        ("version: 1\nrules: [{match: a, style: colwize}]", "unknown style 'colwize'", "did you mean colwise"),
        ("version: 1\nrules: [{match: a, style: 1}]", "style must be a name", None),
        ("version: 1\nrules: [{match: '{a', place: {}}]", "without its counterpart", None),
        ("version: 1\nrules: [{match: a, match: b, place: {}}]", "written twice", None),
        ("version: 1\nmesh: {dp_shard: two}", "'two' ranks", None),
        ("version: 1\nmesh: dp_shard=2", "mesh must be a mapping", None),
        ("version: 1\nmesh: {shard: 2}", "unknown mesh axis 'shard'", None),
        ("version: 1\nmesh: {tp: 1.5}", "1.5 ranks", None),
        ("[" * 5000, "not valid YAML", None),
        ("version: 1\nmesh: 2026-99-99", "mesh must be a mapping", None),
        ("!!python/object/apply:os.getpid []", "not valid YAML", None),
        ("version: !!timestamp x\n", "version 'x'", None),
        ("version: !!bool x\n", "of type 'bool'", None),
        ("version: !!int x\n", "of type 'int'", None),
        ("version: 0x1\n", "of type 'int'", None),
        ("version: !!binary AAAA\n", "of type 'binary'", None),
        ("version: 1\nmesh: &m {<<: *m}\n", "not valid YAML", None),
        ("version: 1\nrules: &r [*r]\n", "inside one another", None),
        ("? [a]\n: 1", "a key that is not text", None),
        ("version: 1\0", "special characters are not allowed", None),
        ("version: 1\nmesh: {'dp_shard=2,tp': 3}", "unknown mesh axis 'dp_shard=2,tp'", None),
        (LAUGHS, "aliases counted as often", None),
    ],
)
def test_parse_rules_bad_text_is_refused_with_the_reason(text, what, hint):
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        parse_rules(text, where="rules.yaml")
    if hint is not None:
        assert hint in caught.value.hint


def test_parse_rules_error_names_the_file_and_the_rule():
    with pytest.raises(UsageError) as caught:
        parse_rules("version: 1\nrules: [{match: a, place: {}}, {match: a, place: {x: R}}]", where="my.yaml")
    assert caught.value.where == "my.yaml, rule 2"


# --set


@pytest.mark.parametrize(
    ("text", "match", "place"),
    [
        ("**.q_proj.weight=tp:S(0)", "**.q_proj.weight", {"tp": S0}),
        ("a=tp:S(1), dp:R", "a", {"tp": S1, "dp_shard": R}),
        ("a.{b,c}=", "a.{b,c}", {}),
        ("odd=name=ep:R", "odd=name", {"ep": R}),
    ],
)
def test_parse_set_text_gives_the_rule(text, match, place):
    rule = parse_set(text)
    assert (rule.match, rule.place, rule.style) == (match, place, None)
    assert text in rule.origin


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("a.b", "is not a rule"),
        ("=tp:R", "is not a rule"),
        ("a=tp", "is not axis:placement"),
        ("a=tp:S(0),", "is not axis:placement"),
        ("a=tp:S(-1)", "is not a placement"),
        ("a=rows:S(0)", "unknown mesh axis 'rows'"),
        ("a=tp:R,tp:S(0)", "placed twice"),
        ("{a=tp:R", "without its counterpart"),
    ],
)
def test_parse_set_bad_text_is_refused(text, fragment):
    with pytest.raises(UsageError, match=re.escape(fragment)):
        parse_set(text)


# Styles


@pytest.mark.parametrize(
    ("style", "name", "num_dims", "expected"),
    [
        ("colwise", "weight", 2, {"tp": S0}),
        ("colwise", "bias", 1, {"tp": S0}),
        ("colwise_gather_output", "weight", 2, {"tp": S0}),
        ("colwise_rep", "weight", 2, {"tp": S0}),
        ("colwise", "gate_up", 3, {"tp": S1}),
        ("colwise", "scale", 0, {}),
        ("rowwise", "weight", 2, {"tp": S1}),
        ("rowwise", "bias", 1, {}),
        ("rowwise", "down_proj", 3, {"tp": Shard(2)}),
        ("rowwise_rep", "weight", 2, {"tp": S1}),
        ("rowwise_split_input", "weight", 2, {"tp": S1}),
        ("packed_colwise", "weight", 2, {"tp": S0}),
        ("packed_colwise", "gate_up_proj", 3, {"tp": S1}),
        ("packed_colwise", "bias", 1, {"tp": S0}),
        ("packed_rowwise", "gate_up_proj", 3, {"tp": Shard(2)}),
        ("packed_rowwise", "bias", 1, {}),
        ("embedding_rowwise", "weight", 2, {"tp": S0}),
        ("embedding_colwise", "weight", 2, {"tp": S1}),
        ("grouped_gemm", "gate_up_proj", 3, {"ep": S0}),
        ("sequence_parallel", "weight", 1, {}),
        ("replicate", "weight", 2, {}),
        ("moe_tp_experts", "weight", 2, {}),
    ],
)
def test_rule_style_cuts_the_dim_that_transformers_cuts(style, name, num_dims, expected):
    rule = Rule(match="m.*.proj", style=style)
    assert rule.find(NameIndex({"w": (f"m.0.proj.{name}",)}))
    assert rule.placements(f"m.0.proj.{name}", num_dims) == expected


def test_rule_style_matches_module_and_parameter_but_no_deeper():
    rule = Rule(match="m.proj", style="colwise")
    names = NameIndex({n: (n,) for n in ("m.proj", "m.proj.weight", "m.proj.x.weight", "x.m.proj.weight", "m")})
    assert rule.find(names) == {"m.proj", "m.proj.weight"}
    assert Rule(match="m.proj", place={}).find(names) == {"m.proj"}
    # One by its own name, one by the source's.
    both = NameIndex({"a": ("m.proj", "b"), "b": ("b", "m.proj.weight"), "c": ("c",)})
    assert Rule(match="m.proj*.{weight}", style="colwise").find(both) == {"b"}
    assert replace(rule, is_live=True, optional=True).find(both) == set()
    assert rule.find(both) == {"a", "b"}


@todays_plans
def test_styles_know_all_that_transformers_registers():
    tensor_parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    registered = set(tensor_parallel.ALL_PARALLEL_STYLES.keys())
    assert "colwise" in registered
    assert registered - STYLES.keys() == set()


# Placing


HSDP_TP = Mesh((("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)))
EP_TP = Mesh((("dp_shard", 2), ("ep", 2), ("tp", 2)))
TP = Mesh((("tp", 2),))
PACKED = (Rule(match="a.off", place={}), Rule(match="a.*", style="packed_colwise"))


@pytest.mark.parametrize(
    ("tensors", "mesh", "rules", "placements"),
    [
        # What fully_shard gives.
        (
            [tensor("a", 4, 4), tensor("b", 3), tensor("scalar"), tensor("empty", 0, 4)], HSDP_TP, (),
            {"a": {"dp_shard": S0}, "b": {"dp_shard": S0}, "scalar": {}, "empty": {"dp_shard": S0}},
        ),
        ([tensor("a", 4)], TP, (), {"a": {}}),
        # The first match wins, and a rule that is overtaken everywhere still matches.
        (
            [tensor(fqn, 4, 4) for fqn in ("a.w", "a.v", "b")], FSDP_TP, ("a.w=", "a.*=tp:S(1)", "**=tp:S(0)"),
            {"a.w": {"dp_shard": S0}, "a.v": {"dp_shard": S0, "tp": S1}, "b": {"dp_shard": S0, "tp": S0}},
        ),
        ([tensor("a", 4)], FSDP_TP, ("**=", "a=tp:S(0)"), {"a": {"dp_shard": S0}}),
        # FSDP is moved or lifted.
        ([tensor("a", 3, 8)], FSDP, ("a=dp_shard:S(1)",), {"a": {"dp_shard": S1}}),
        ([tensor("a", 3)], FSDP, ("a=dp_shard:R",), {"a": {}}),
        # An optional rule may match nothing.
        ([tensor("a", 4)], FSDP_TP, (Rule(match="h", style="colwise", optional=True),), {"a": {"dp_shard": S0}}),
        ([tensor("a", 8)], EP_TP, ("a=ep:S(0),tp:S(0)",), {"a": {"dp_shard": S0, "ep": S0, "tp": S0}}),
        # Uneven cuts that torch loads.
        ([tensor("a", 7, 5)], TP, ("a=tp:S(0)",), {"a": {"tp": S0}}),
        ([tensor("a", 7, 5)], Mesh((("dp_shard", 1), ("tp", 2))), ("a=tp:S(0)",), {"a": {"dp_shard": S0, "tp": S0}}),
        ([tensor("a", 7, 5)], FSDP_TP, ("a=tp:S(0),dp_shard:R",), {"a": {"tp": S0}}),
        ([tensor("a", 7, 5)], FSDP_TP, ("a=tp:S(1)",), {"a": {"dp_shard": S0, "tp": S1}}),
        ([tensor("a", 6)], Mesh((("dp_shard", 4), ("tp", 2))), ("a=tp:S(0)",), {"a": {"dp_shard": S0, "tp": S0}}),
        # Less than a byte.
        ([tensor("a", 3, 16, dtype="F4")], FSDP, ("a=dp_shard:S(1)",), {"a": {"dp_shard": S1}}),
        ([tensor("a", 4, 4, dtype="F6_E2M3")], FSDP, (), {"a": {"dp_shard": S0}}),
        ([tensor("a", 8, dtype="F6_E2M3")], FSDP, ("a=dp_shard:R",), {"a": {}}),
    ],
)  # fmt: skip
def test_place_tensors_gives_every_tensor_its_placements(tensors, mesh, rules, placements):
    rules = [parse_set(rule) if isinstance(rule, str) else rule for rule in rules]
    assert place_tensors(tensors, mesh, rules).placements == placements


def test_place_tensors_rule_without_a_match_is_refused_with_the_nearest_names():
    tensors = [tensor(f"model.layers.{i}.self_attn.q_proj.weight", 8, 8) for i in range(40)]
    tensors.append(tensor("lm_head.weight", 8, 8))
    with pytest.raises(UsageError, match="matches no tensor") as caught:
        place_tensors(tensors, FSDP_TP, (parse_set("layers.*.self_attn.q_proj.weight=tp:S(0)"),))
    assert "model.layers.0.self_attn.q_proj.weight" in caught.value.hint
    assert "layers.1." not in caught.value.hint


@pytest.mark.parametrize(
    ("entry", "mesh", "rules", "what", "hint"),
    [
        *(
            ((4, 4), FSDP, (rule,), "needs the axis tp, which the mesh dp_shard=4 does not have", "")
            for rule in ("a=tp:S(0)", "a=tp:R", Rule(match="a", style="rowwise"))
        ),
        *((dims, FSDP_TP, ("a=tp:S(1)",), r"tp:S\(1\) cannot cut tensor 'a' .* no dim 1", "") for dims in ((), (4,))),
        # Torch cannot load these.
        *(
            (
                (7, 4), Mesh((("dp_shard", 2), (axis, 2))), (f"a={axis}:S(0)",),
                f"'a': {axis} and dp_shard both cut dim 0.*it cannot load", "--set 'a='",
            )
            for axis in ("tp", "ep")
        ),
        ((6,), EP_TP, ("a=ep:S(0),tp:S(0)",), "not divisible by ep×tp=4", ""),
        # Nor does fully_shard cut so.
        ((4, 6), FSDP, ("a=dp_shard:S(1)",), r"dp_shard:S\(1\) needs the 6 elements of dim 1 to be divisible", ""),
        ((4, 6), FSDP_TP, ("a=dp_shard:S(1),tp:S(1)",), r"needs the 3 elements of dim 1 left by tp=2", ""),
        # F4 is counted in bytes, and a byte of F6 is whole.
        (tensor("a", 3, 12, dtype="F4"), FSDP, ("a=dp_shard:S(1)",), "needs the 6 elements", ""),
        (tensor("a", 4, 3, dtype="F4"), FSDP, (), "ends inside a byte", ""),
        (tensor("a", 8, dtype="F6_E2M3"), FSDP, (), "inside a byte", "a=dp_shard:R"),
    ],
)  # fmt: skip
def test_place_tensors_cut_that_cannot_be_is_refused(entry, mesh, rules, what, hint):
    rules = [parse_set(rule) if isinstance(rule, str) else rule for rule in rules]
    with pytest.raises(UsageError, match=what) as caught:
        place_tensors([tensor("a", *entry) if isinstance(entry, tuple) else entry], mesh, rules)
    assert hint in (caught.value.hint or "")


def test_place_tensors_packed_matrices_are_named_where_ranks_have_parts_of_them():
    tensors = [tensor("a.off", 8, 4), tensor("a.w", 8, 4), tensor("a.bias", 8), tensor("b", 8, 4)]
    assert place_tensors(tensors, FSDP_TP, PACKED).packed == ("a.w",)
    assert place_tensors(tensors, Mesh((("tp", 1),)), PACKED).packed == ()


def test_place_tensors_uneven_cut_is_left_out_on_demand():
    tensors = [tensor("a.odd", 7, 4), tensor("a.even", 8, 4), tensor("a.scalar")]
    rules = (Rule(match="a.*", style="colwise"),)
    placed = place_tensors(tensors, FSDP_TP, rules, uneven="replicate")
    assert placed.placements == {"a.odd": {"dp_shard": S0}, "a.even": {"dp_shard": S0, "tp": S0}, "a.scalar": {}}
    assert placed.kept_whole == {"a.odd": ("tp",)}
    # Without FSDP in the same dim, PyTorch and transformers cut unevenly.
    assert place_tensors(tensors, TP, rules, uneven="replicate").kept_whole == {}
    with pytest.raises(UsageError, match="not divisible by tp=2") as caught:
        place_tensors(tensors, FSDP_TP, rules)
    assert "--tp-uneven replicate" in caught.value.hint


def test_cut_entry_f4_gives_logical_elements_cut_at_bytes():
    grid = cut_entry(tensor("a", 2, 10, dtype="F4"), TP, {"tp": S1})
    assert [box for _, box in grid.cells] == [Box((0, 0), (2, 6)), Box((0, 6), (2, 4))]


# Plans

PARTS = "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
LLAMA_NAMES = (
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in (*PARTS.split(), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ),
    *("model.norm.weight", "lm_head.weight"),
)


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


def llama_config(**changes):
    return LLAMA | SIZES | {"num_key_value_heads": 2, "head_dim": 4} | changes


def plan_rules(config, names):
    """Return the rules of transformers' plan, found in this process, for tensors of any shape."""
    check_quantization(config)
    return [replace(rule, shapes={}) for rule in tp_plan_rules(config, names, found_plan(config))]


def found_plan(config):
    import_model_class(config)  # as a command does: what libraries do while they are imported is no model's doing
    with in_sandbox(Sandbox(subject="a model", where="config.json", scratch=tempfile.gettempdir())):
        return find_tp_plan(config)


def placed_by_plan(config, names):
    tensors = [tensor(name, *(8,) if "norm" in name else (8, 8)) for name in names]
    placed = place_tensors(tensors, TP, plan_rules(config, names)).placements
    return {name: str(placements["tp"]) for name, placements in placed.items() if placements}


def expected_llama(root):
    expected = {f"{root}embed_tokens.weight": "S(0)"}
    for name in LLAMA_NAMES:
        if ".layers." in name and "norm" not in name:
            rowwise = "o_proj" in name or "down_proj" in name
            expected[root + name.removeprefix("model.")] = "S(1)" if rowwise else "S(0)"
    return expected


@todays_plans
def test_tp_plan_rules_llama_cuts_every_matrix():
    assert placed_by_plan(llama_config(), LLAMA_NAMES) == expected_llama("model.") | {"lm_head.weight": "S(0)"}


@todays_plans
def test_tp_plan_rules_bare_model_names_are_recognised():
    names = [name.removeprefix("model.") for name in LLAMA_NAMES if name != "lm_head.weight"]
    assert placed_by_plan(llama_config(), names) == expected_llama("")
    assert placed_by_plan(llama_config(architectures=["LlamaModel"]), names) == expected_llama("")


@todays_plans
def test_tp_plan_rules_trainer_root_is_recognised():
    names = [f"app.model.{name}" for name in LLAMA_NAMES] + ["step"]
    expected = expected_llama("app.model.model.") | {"app.model.lm_head.weight": "S(0)"}
    assert placed_by_plan(llama_config(), names) == expected


def test_tp_plan_rules_tied_head_may_be_absent():
    names = LLAMA_NAMES[:-1]
    assert placed_by_plan(llama_config(tie_word_embeddings=True), names) == expected_llama("model.")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (LLAMA_NAMES[:-1], "'lm_head' matches no tensor"),
        ([name for name in LLAMA_NAMES if "up_proj" not in name], r"mlp.up_proj' matches no tensor"),
        (["transformer.h.0.attn.c_attn.weight"], "none of the names of the plan"),
    ],
    ids=["an untied head that is absent", "a missing projection", "foreign names"],
)
def test_tp_plan_rules_names_that_are_not_the_plan_s_are_refused(names, what):
    with pytest.raises(UsageError, match=what):
        placed_by_plan(llama_config(), names)


MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def moe_names():
    """The names of the live model."""
    experts = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    rest = [name for name in LLAMA_NAMES if ".mlp." not in name]
    return [*rest, *(f"model.layers.{i}.mlp.{name}" for i in range(2) for name in experts)]


@todays_plans
def test_tp_plan_rules_experts_are_cut_inside_and_the_router_is_whole():
    names = moe_names()
    tensors = [tensor(name, *(4, 8, 8) if "experts" in name else (8, 8)) for name in names]
    placed = place_tensors(tensors, TP, plan_rules(llama_config(**MOE), names))
    experts = {name: cuts for name, cuts in placed.placements.items() if ".mlp." in name}
    cuts_of = {"gate.weight": {}, "experts.gate_up_proj": {"tp": S1}, "experts.down_proj": {"tp": Shard(2)}}
    assert experts == {f"model.layers.{i}.mlp.{name}": cuts for i in range(2) for name, cuts in cuts_of.items()}
    assert placed.packed == tuple(f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2))


@todays_plans
def test_tp_plan_rules_names_of_the_files_are_refused_with_the_way_out():
    files = [
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight" for i in range(2) for e in range(4) for p in ("up", "down")
    ]
    names = [*(name for name in moe_names() if "experts" not in name), *files]
    tensors = [tensor(name, 8, 8) for name in names]
    with pytest.raises(UsageError, match="matches no tensor") as caught:
        place_tensors(tensors, TP, plan_rules(llama_config(**MOE), names))
    assert "names of the live model" in caught.value.hint
    assert "--names" not in caught.value.hint


@todays_plans
def test_tp_plan_rules_tensor_of_another_shape_is_refused():
    plan = found_plan(llama_config())
    shapes = {f"app.{name}": plan.shapes.get(name, (16,)) for name in LLAMA_NAMES}
    rules = tp_plan_rules(llama_config(), list(shapes), plan)
    assert place_tensors([tensor(name, *shape) for name, shape in shapes.items()], TP, rules)
    name = "app.model.layers.1.mlp.down_proj.weight"
    shapes[name] = shapes[name][::-1]
    with pytest.raises(UsageError, match=r"has shape \[32, 16\] here and \[16, 32\] in the live model") as caught:
        place_tensors([tensor(name, *shape) for name, shape in shapes.items()], TP, rules)
    assert f"--set '{name}=tp:S(d)'" in caught.value.hint


def test_tp_plan_rules_whole_parameter_of_a_module_that_is_cut_stays_whole():
    styles = {"m.proj": "colwise", "m.proj.scale": "replicate"}
    plan = TpPlan(title="a model", styles=styles, may_lack=frozenset(), base_prefix="")
    names = ["m.proj.weight", "m.proj.scale"]
    rules = tp_plan_rules({}, names, plan)
    placed = place_tensors([tensor(name, 8, 8) for name in names], TP, rules).placements
    assert placed == {"m.proj.weight": {"tp": S0}, "m.proj.scale": {}}


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"architectures": ["NoSuchModel"]}, "no model class NoSuchModel"),
        ({"architectures": ["AutoConfig"]}, "no model class AutoConfig"),
        ({"architectures": []}, "does not name an architecture"),
        ({"architectures": "LlamaForCausalLM"}, "does not name an architecture"),
        ({"hidden_size": "wide"}, "does not describe a LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"quantization_config": 4}, "quantised"),
    ],
)
def test_tp_plan_rules_impossible_config_is_refused(changes, fragment):
    with pytest.raises(UsageError, match=fragment):
        plan_rules(llama_config(**changes), LLAMA_NAMES)


def test_tp_plan_rules_model_without_a_plan_is_refused():
    config = {"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 1}
    with pytest.raises(UsageError, match="no tensor-parallel plan for BertModel") as caught:
        plan_rules(config, ["embeddings.word_embeddings.weight"])
    assert "--rules" in caught.value.hint


@todays_plans
@pytest.mark.parametrize("model_type", LLAMA_FAMILY)
def test_built_in_plan_equals_that_of_transformers(model_type):
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    config = llama_config(model_type=model_type, architectures=[f"{architecture}ForCausalLM"])
    ours, theirs = _built_in_plan(config), found_plan(config)
    uncut = {key for key, style in theirs.styles.items() if STYLES[style] == "whole"}
    assert ours.styles == {key: style for key, style in theirs.styles.items() if key not in uncut}
    assert (ours.may_lack, ours.base_prefix) == (theirs.may_lack, theirs.base_prefix)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.placement.tp_plan import tp_plan_rules
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
for rule in tp_plan_rules(config, ["model.layers.0.self_attn.q_proj.weight"], None):
    print(rule.match, rule.style, rule.optional)
try:
    tp_plan_rules(config | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, [], None)
except UsageError as error:
    print(error.what, "|", error.hint)
"""


def test_tp_plan_rules_without_transformers_uses_the_built_in_table():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "lm_head colwise_gather_output True" in lines
    assert "model.layers.*.self_attn.o_proj rowwise False" in lines
    assert "no tensor-parallel plan is built in for GPT2LMHeadModel" in lines[-1]
    assert "pip install" in lines[-1]


def test_rules_import_no_torch():
    modules = ["place", "rule", "tp_plan"]
    code = f"import sys, {', '.join(f'ckpt_tools.transfer.placement.{name}' for name in modules)}\n"
    code += "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
