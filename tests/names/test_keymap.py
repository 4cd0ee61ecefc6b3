"""The language of key maps: what every word does on numbers, and what is refused with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from names.keymaps import assert_same, backward, described, forward

from ckpt_tools.checkpoint.names import keymap
from ckpt_tools.checkpoint.names.keymap import load_key_maps, parse_key_maps
from ckpt_tools.errors import UsageError
from ckpt_tools.models.conventions import CONVENTIONS

ROOT = Path(__file__).parents[2]


def numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


A, B = numbers(4, 6), numbers(4, 6, first=100)
EXPERTS = {f"l.{at}.e.{e}.w": numbers(2, 3, first=100 * at + 10 * e) for at in range(2) for e in range(3)}
STACKED = torch.stack([torch.stack([EXPERTS[f"l.{at}.e.{e}.w"] for e in range(3)]) for at in range(2)])
CASES = {
    "a = b": ({"a": A}, {"b": A}),
    "a, b = c : cat 1": ({"a": A, "b": B}, {"c": torch.cat([A, B], 1)}),
    "a, b = c : cat 0 n rest": ({"a": A[:2], "b": B}, {"c": torch.cat([A[:2], B])}),
    "c = a, b : cut 1": ({"c": torch.cat([A, B], 1)}, {"a": A, "b": B}),
    "c = a, b : cut 0 rest n*2": ({"c": torch.cat([A, B])}, {"a": A, "b": B}),
    "c = a, b : transpose; cut 0": ({"c": torch.cat([A.T, B.T], 1)}, {"a": A, "b": B}),
    "a, b = c, d": ({"a": A, "b": B}, {"c": A, "d": B}),
    "c = a, d, b : cut 0 n rest rest": ({"c": torch.cat([A, A])}, {"a": A[:2], "d": A[[2, 3, 0]], "b": A[1:]}),
    "same a.*.{b,c}": ({"a.3.b": A, "a.0.c": B}, {"a.3.b": A, "a.0.c": B}),
    "{a,b}.x{1,2} = y{2,1}.{b.c,a}": ({"a.x1": A, "a.x2": B, "b.x1": A + 1, "b.x2": B + 1},
        {"y2.b.c": A, "y2.a": B, "y1.b.c": A + 1, "y1.a": B + 1}),
    "{a,c} = {b,d} : swap 0 n": ({"a": A, "c": B[:2]}, {"b": A, "d": B[[1, 0]]}),
    "a = b : swap 1": ({"a": A}, {"b": torch.cat([A[:, 3:], A[:, :3]], 1)}),
    "a = b : transpose": ({"a": EXPERTS["l.0.e.1.w"][None]}, {"b": EXPERTS["l.0.e.1.w"].T[None]}),
    "a = b : rope n": ({"a": A}, {"b": A}),
    "a = b : rope 1": ({"a": A}, {"b": A[[0, 2, 1, 3]]}),
    "a = b : pad 4 7": ({"a": A}, {"b": A[[0, 1, 2, 3, 3, 3, 3]]}),
    "a = b : repeat n n*3": ({"a": A}, {"b": A[[0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]]}),
    "a = b : rope 1; repeat 1 n": ({"a": A}, {"b": A[[0, 2, 1, 3, 0, 2, 1, 3]]}),
    "a = b : flatten 0 4 rest": ({"a": A}, {"b": A.reshape(24)}),
    "a = b : flatten 1 n rest 3; transpose": ({"a": numbers(4, 2, 5, 3, 1)}, {"b": numbers(4, 30, 1).mT}),
    "a = b : unflatten 1 n rest": ({"a": A}, {"b": A.reshape(4, 2, 3)}),
    "a = b : unflatten 0 n rest 1; flatten 1 n 1 rest": ({"a": A}, {"b": A.reshape(2, 12)}),
    "a = b : transpose; flatten 0 rest 4": ({"a": A}, {"b": A.T.reshape(24)}),
    "a = b : transpose; unflatten 0 3 n": ({"a": A}, {"b": A.T.reshape(3, 2, 4)}),
    "l.*.e.+.w = x.*.w+": (EXPERTS, {re.sub(r"l.(\d).e.(\d).w", r"x.\1.w\2", n): t for n, t in EXPERTS.items()}),
    "l.*.e.+.w = x.*.w": (EXPERTS, {f"x.{at}.w": STACKED[at] for at in range(2)}),
    "l.*.e.+.w = x.+.w": (EXPERTS, {f"x.{e}.w": STACKED[:, e] for e in range(3)}),
    "l.*.e.+.w = w": (EXPERTS, {"w": STACKED}),
    "l.*.e.+.w = w : transpose": (EXPERTS, {"w": STACKED.transpose(2, 3)}),
    "l.*.a = m.*.b\nl.{*+n}.a = more.*.b": ({f"l.{at}.a": A + at for at in range(4)},
        {**{f"m.{at}.b": A + at for at in range(2)}, **{f"more.{at}.b": A + at + 2 for at in range(2)}}),
    "l.*.a = m.*.b\nagain l.* = m.* as l.{*+n} = more.*": ({f"l.{at}.a": A + at for at in range(3)},
        {**{f"m.{at}.b": A + at for at in range(2)}, "more.0.b": A + 2}),
    "l.*.a = m.*.b if l.*.c | m.*.d\nl.*.c = m.*.c": ({"l.0.a": A, "l.1.a": B, "l.1.c": A},
        {"m.0.d": A, "m.1.b": B, "m.1.c": A}),
    "a = b\ndrop c.**": ({"a": A, "c.d.e": B}, {"b": A, "c.d.e": B}),
}  # fmt: skip


@pytest.mark.parametrize("text", list(CASES))
def test_map_makes_this_and_leads_back(text: str) -> None:
    hub, other = CASES[text]
    key_map = parse_key_maps(f"[*]\n{text}", where="file")["*"]
    assert_same(forward(key_map, hub, {"n": 2}), other)
    assert_same(backward(key_map, other, {"n": 2}), hub)
    assert key_map.knows(other)


READ = {
    "a = b | c": ({"c": A}, {"a": A}),
    "a = x[.y].b": ({"x.b": A}, {"a": A}),
    "a, b = c : cat 0\nor a, b = d, e": ({"d": A, "e": B}, {"a": A, "b": B}),
    "a = b : crop n": ({"b": A}, {"a": A[:2]}),
    "a = b\nskip c.*.d": ({"b": A, "c.7.d": B}, {"a": A}),
}


@pytest.mark.parametrize("text", list(READ))
def test_map_reads_what_it_does_not_write(text: str) -> None:
    other, hub = READ[text]
    assert_same(backward(parse_key_maps(f"[*]\n{text}", where="file")["*"], other, {"n": 2}), hub)


def test_what_was_left_out_and_what_has_no_place_is_told() -> None:
    key_map = parse_key_maps("[*]\nl.*.a = b.*\nskip c\nlost d.* if l.*.a | e.*", where="file")["*"]
    back = key_map.backward(described({"b.0": A, "c": A, "e.0": A}), {})
    assert back.notes == ("left out c, which the model computes when it is built",)
    assert back.lost == ("e.0",)
    assert back.mosaics.keys() == {"l.0.a", "e.0"}
    made = key_map.forward(described({"l.0.a": A}), {})
    assert made.notes == ("not in the files, written as zeros: d.0",)
    assert (made.mosaics["d.0"].is_zeros, made.mosaics["d.0"].shape) == (True, tuple(A.shape[:1]))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a = b : cat 0", "not an operation on 1 tensors"),
        ("a, b = c : cat", "not an operation"),
        ("a, b = c : cat x", "not an operation"),
        ("a, b = c : cat 0 1", "not an operation"),
        ("a = b : cut 0", "not an operation"),
        ("a = b, c : cut 0; cut 0", "not an operation"),
        ("a = b : swap", "not an operation"),
        ("a = b : crop", "not an operation"),
        ("a = b : pad 4", "not an operation"),
        ("a = b : repeat 4", "not an operation"),
        ("a = b : flatten 0 4", "not an operation"),
        ("a = b : unflatten x 4 4", "not an operation"),
        ("a = b, c", "do not match each other"),
        ("a, b, c = d, e : cat 0", "do not match each other"),
        ("a.*.* = b.*.*", "do not match each other"),
        ("a = b.{*+k}", "do not match each other"),
        ("a.*, b = c : cat 0", "do not match each other"),
        ("a.* = b.* if c.+", "do not match each other"),
        ("a.{*+k} = b.* if c.*", "do not match each other"),
        ("a = b if", "do not match each other|needs a name"),
        ("a = b b", "do not match each other"),
        ("a = b = c", "an invalid line"),
        ("a.{b,c} = a.{b,c,d}", "different numbers of choices"),
        ("same a b", "do not match each other"),
        ("tie a", "an invalid line"),
        ("tie a.* b.*", "an invalid line"),
        ("drop a b", "an invalid line"),
        ("drop a.*.*", "an invalid line"),
        ("skip a.{*+k}", "an invalid line"),
        ("lost", "an invalid line"),
        ("count x n", "an invalid line"),
        ("count * a.b/c", "an invalid line"),
        ("count * n\ncount * m", "an invalid line"),
        ("a.* = b.*\ncount b.* n", "no line has numbers"),
        ("again a", "an invalid line"),
        ("again a.* = b.* as c.* = d.*", "no line above"),
        ("a.0.b = c\na.*.b = d.*", "cannot be reversed"),
        ("a = c.5\nb.* = c.*", "cannot be reversed"),
        ("a = b\nskip b", "cannot be reversed"),
        ("a = b\nlost b", "cannot be reversed"),
        ("a = b\ndrop a", "cannot be reversed"),
    ],
)
def test_line_that_cannot_be_meant_is_refused(line: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as found:
        parse_key_maps(f"[*]\n{line}", where="mine.txt")
    assert (found.value.where or "").startswith("mine.txt")


@pytest.mark.parametrize(
    ("line", "names", "what"),
    [
        ("a, b = c : cat 0", {"a": (2, 3), "b": (4, 3)}, "should be equally long"),
        ("a, b = c : cat 0 n n", {"a": (2, 3), "b": (4, 3)}, r"should be \[2, 2\]"),
        ("a, b = c : cat 2", {"a": (2, 3), "b": (2, 3)}, "no dim 2"),
        ("a, b = c : cat 0", {"a": (2, 3), "b": (2, 4)}, "differ in shape"),
        ("a = b, c : cut 0", {"a": (3, 3)}, "2 equal parts"),
        ("a = b, c : cut 0 n n", {"a": (3, 3)}, "cannot be cut"),
        ("a = b, c : cut 0 rest rest", {"a": (3, 3)}, "cannot be cut"),
        ("a = b : swap 1", {"a": (2, 3)}, "2 equal parts"),
        ("a = b : transpose", {"a": (3,)}, "fewer than two dims"),
        ("a = b : rope n", {"a": (6, 3)}, "6 rows are not those of 2 heads"),
        ("a = b : rope n", {"a": ()}, "0 rows|not those"),
        ("a = b : rope m", {"a": (8, 3)}, "needs m"),
        ("a = b : rope n.x", {"a": (8, 3)}, "needs n.x"),
        ("a, b, c = d : qkv 3 2", {"a": (6, 1), "b": (4, 1), "c": (4, 1)}, "not those of 3 heads"),
        ("a = b : pad 3 4", {"a": (2, 1)}, "2 rows are not the 3"),
        ("a = b : pad 2 1", {"a": (2, 1)}, "cannot be padded"),
        ("a = b : repeat 2 3", {"a": (2, 1)}, "cannot be repeated"),
        ("a = b : repeat 3 6", {"a": (2, 1)}, "3 equal parts"),
        ("a = b : flatten 0 2 2", {"a": (2, 3)}, "should be"),
        ("a = b : flatten 1 2 2", {"a": (2, 2)}, "should be"),
        ("a = b : unflatten 0 2 rest", {"a": (3, 3)}, "3 in dim 0"),
        ("a = b : unflatten 2 2 2", {"a": (4, 4)}, "0 in dim 2"),
        ("a = b : unflatten 0 rest rest", {"a": (4, 4)}, "4 in dim 0"),
        ("a = b : unflatten 0 100001 2", {"a": (200_002,)}, "100001 runs"),
        ("a.* = b", {"a.0": (2, 3), "a.2": (2, 3)}, "without number 1"),
        ("a.* = b", {"a.0": (2, 3), "a.1": (3, 3)}, "differ in shape"),
        ("a.* = b.*", {"a.1": (2, 3), "a.01": (2, 3)}, "no place for a.01"),
        ("a.* = b.*", {"a.123456": (2, 3)}, "no place for a.123456"),
        ("a.* = b.* if c.*\nc.* = d.*", {"a.1": (2, 3), "c.0": (2, 3)}, "needs one of c.1 beside it"),
        ("a.* = b.*\ncount * n", {"a.0": (2, 3)}, r"number 1 of a\.\* is missing"),
        ("a.* = b.*\ncount * n", {"a.0": (2,), "a.1": (2,), "a.2": (2,)}, r"2 of a\.\* is one too many"),
        ("a.*.b.+ = c.*\ncount + n", {"a.0.b.0": (2,), "a.0.b.1": (2,), "a.1.b.0": (2,)}, r"1 of a\.1\.b"),
    ],
)
def test_tensors_that_a_line_is_not_of_are_refused(line: str, names: dict, what: str) -> None:
    key_map = parse_key_maps(f"[*]\n{line}", where="mine.txt")["*"]
    with pytest.raises(UsageError, match=what):
        forward(key_map, {name: torch.zeros(shape) for name, shape in names.items()}, {"n": 2})


def test_heads_of_another_length_than_the_config_says_are_not_permuted() -> None:
    """Rows that divide by the heads are not enough: a wrong number of heads would permute them without a word."""
    key_map = parse_key_maps("[*]\na = b : rope n\nc = d : rope v.n", where="mine.txt")["*"]
    hub = {"a": torch.zeros(8, 3), "c": torch.zeros(16, 3)}
    forward(key_map, hub, {"n": 2, "head_dim": 4, "v": {"n": 2, "head_dim": 8}})
    for text, vision, what in ((2, 8, "8 rows are not those of 2 heads of 2"), (4, 4, "16 rows are not those .* of 4")):
        with pytest.raises(UsageError, match=what):
            forward(key_map, hub, {"n": 2, "head_dim": text, "v": {"n": 2, "head_dim": vision}})


def test_layers_of_one_list_do_not_stand_for_those_of_another() -> None:
    text, hub = "[*]\nt.*.a = a.*\nv.*.a = b.*\ncount * n", dict.fromkeys(("t.0.a", "v.0.a", "v.1.a"), torch.zeros(2))
    key_map = parse_key_maps(text, where="mine.txt")["*"]
    with pytest.raises(UsageError, match=r"n is 2 in config.json, but number 1 of t\.\* is missing"):
        forward(key_map, hub, {"n": 2, "v": {"n": 2}})
    with pytest.raises(UsageError, match=r"number 1 of v\.\* is one too many") as found:
        forward(key_map, hub, {"n": 1, "v": {"n": 2}})
    line = (found.value.hint or "").rpartition(": ")[2].replace("KEY", "v.n")  # as the hint says
    forward(parse_key_maps(f"{text}\n{line}", where="mine.txt")["*"], hub, {"n": 1, "v": {"n": 2}})


@pytest.mark.parametrize(
    ("line", "names", "what"),
    [
        ("l.*.a = b", {"b": ()}, "numbers of"),
        ("l.*.e.+ = b", {"b": (3,)}, "numbers of"),
        ("a = b | c", {"b": (2,), "c": (2,)}, "one tensor has two names"),
        ("a, b = c : cat 0\nor a, b = d, e", {"d": (2,)}, "d also needs e"),
        ("a = b : crop n", {"b": (1,)}, "1 rows are fewer than the 2"),
        ("a = b : pad n 4", {"b": (3,)}, "3 rows are not the 4"),
        ("a = b : repeat 4 6", {"b": (6,)}, "those of 4, repeated"),
        ("l.{*+n}.a = m.*", {"m.0": (2,), "x": (2,)}, "no place for x"),
    ],
)
def test_tensors_of_the_other_side_that_a_line_is_not_of_are_refused(line: str, names: dict, what: str) -> None:
    key_map = parse_key_maps(f"[*]\n{line}", where="mine.txt")["*"]
    with pytest.raises(UsageError, match=what):
        backward(key_map, {name: torch.zeros(shape) for name, shape in names.items()}, {"n": 2})


def test_reading_more_changes_no_digest() -> None:
    """What `shard` wrote comes back by a later ckpt that reads more spellings."""
    before, more, other = (
        parse_key_maps(f"[*]\n{text}", where="file")["*"].digest
        for text in ("a = b\nskip c", "a = b | d\nor a = e\nskip f", "a = d | b\nskip c")
    )
    assert before == more != other


@pytest.mark.parametrize("convention", [*CONVENTIONS, "comfyui"])
def test_every_file_is_a_map_with_a_way_back(convention: str) -> None:
    maps = parse_key_maps((Path(keymap.__file__).parent / f"{convention}.txt").read_text(), where=convention)
    assert ("llama" in maps) == (convention in CONVENTIONS)
    assert {name: one.section for name, one in maps.items()} == {
        name: one.section for name, one in load_key_maps(convention).items()
    }


def test_examples_of_the_docstring_and_of_the_guide_are_maps() -> None:
    doc = (keymap.__doc__ or "").partition("::\n")[2].partition("\n\nA section")[0]
    assert parse_key_maps(doc, where="doc")["qwen2"].knows(["layers.3.attention.wv.weight", "rope.freqs"])
    guide = (ROOT / "docs" / "guides" / "write-a-key-map.md").read_text()
    text = re.findall(r"```text names.txt\n(.*?)```", guide, re.DOTALL)[0]
    assert parse_key_maps(text, where="guide")["*"].knows(["wte", "h.0.attn.q", "h.3.fc1"])
