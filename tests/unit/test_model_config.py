"""The config of weights that were cast: it names their dtype, and every other byte is as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from samples import MODEL, examples, write_model
from transformers import AutoConfig

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.formats.manifest import parse_manifest
from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.models.config import (
    MAX_CONFIG_BYTES,
    config_beside,
    config_in,
    parse_config,
    read_config,
    restate_dtype,
)
from ckpt_tools.storage.source import LocalSource

NESTED = b"""{
   "architectures" : ["A"],
  "torch_dtype":"float32", "dtype":   "torch.float16",
  "text_config": {"hidden_size": 8, "dtype": "bfloat16", "deep_config": {"dtype": "float32"}},
  "encoder": {"dtype": "float16", "model_type": "t5"},
  "quantization_config": {"dtype": "float16", "inner_config": {"dtype": "float16"}, "model_type": "x"},
  "rope": {"dtype": "float32"},
  "list": [{"dtype": "float32", "model_type": "y"}, "dtype", "float32"],
  "time_step_limit": [0.0, Infinity],
  "vision_config": {"dtype": null},\t"audio_config": {"dtype": "auto"},
  "name": "\\"dtype\\": \\"float32\\" {", "d\\u0074ype": "float64"
}\r\n"""


def test_config_names_the_new_dtype_in_it_and_in_its_sub_configs_only() -> None:
    restated = restate_dtype(NESTED, BY_NAME["BF16"])
    assert restated is not None
    assert restated.text == NESTED.replace(
        b'"torch_dtype":"float32", "dtype":   "torch.float16"', b'"torch_dtype":"bfloat16", "dtype":   "torch.bfloat16"'
    ).replace(b'"deep_config": {"dtype": "float32"}', b'"deep_config": {"dtype": "bfloat16"}').replace(
        b'{"dtype": "float16", "model_type": "t5"}', b'{"dtype": "bfloat16", "model_type": "t5"}'
    ).replace(b'"float64"', b'"bfloat16"')
    assert restated.before == ("float32", "torch.float16", "float16", "float64")


@pytest.mark.parametrize(
    "text", [b"{}", b'{"dtype": "bfloat16"}', b'{"dtype": 3}', b"[]", b'"dtype"', b"{\n}", b'{"a": []}']
)
def test_config_that_has_nothing_to_change_is_none(text: bytes) -> None:
    assert restate_dtype(text, BY_NAME["BF16"]) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"dtype: float32", b"\xff{}", b"\xef\xbb\xbf{}", b'{"dtype": "a}', b"[" * 99999]
)
def test_config_that_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableError, match="not JSON"):
        restate_dtype(text, BY_NAME["BF16"])


NAMES = st.sampled_from(
    ["dtype", "torch_dtype", "model_type", "text_config", "quantization_config", "a", '"', "\\", "é"]
)
LEAVES = st.one_of(st.none(), st.integers(), st.sampled_from(["float32", "torch.half", "auto", '{"', "\n"]))
VALUES = st.recursive(LEAVES, lambda some: st.lists(some, max_size=3) | st.dictionaries(NAMES, some, max_size=5))


def expected(value: object, *, is_root: bool = True, name: str = "") -> object:
    """The same in terms of objects."""
    if not isinstance(value, dict) or name == "quantization_config":
        return value
    if not (is_root or name.endswith("_config") or "model_type" in value):
        return value
    return {
        key: ("torch." if one.startswith("torch.") else "") + "float16"
        if key in ("dtype", "torch_dtype") and one in ("float32", "torch.half")
        else expected(one, is_root=False, name=key)
        for key, one in value.items()
    }


@pytest.mark.full
@settings(deadline=None, max_examples=examples(300))
@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_config_changes_as_its_objects_would(value: object, indent: int | str | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    restated = restate_dtype(text.encode(), BY_NAME["F16"])
    wanted = json.dumps(expected(value), indent=indent, ensure_ascii=is_ascii)
    assert (text if restated is None else restated.text.decode()) == wanted


CONFIG = b'{\n "model_type": "llama",  "torch_dtype": "float32",\n "hidden_size": 64 }\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", MODEL, assets={"config.json": CONFIG, "sub/config.json": CONFIG})


def verbs(model: Path, tmp_path: Path):
    """Every conversion that casts, with the note of each."""
    run = tmp_path / "run"
    api.shard(model, run, mesh="dp_shard=2", num_workers=1)
    yield "gather", lambda out, **options: api.gather(run, out, **options)
    yield "shard", lambda out, **options: api.shard(model, out, mesh="dp_shard=2", **options)
    yield "reshard", lambda out, **options: api.reshard(run, out, mesh="dp_shard=3", **options)


def test_conversions_that_cast_write_a_config_that_says_so(model: Path, tmp_path: Path) -> None:
    for name, convert in verbs(model, tmp_path):
        out = tmp_path / name
        planned = convert(out, dtype="f16", dry_run=True)
        result = convert(out, dtype="f16")
        written = (out / "config.json").read_bytes()
        assert written == CONFIG.replace(b"float32", b"float16"), name
        assert (out / "sub" / "config.json").read_bytes() == CONFIG
        assert [note for note in result.notes if "config.json" in note] == [
            "config.json now has 'float16', not 'float32': the weights were cast"
        ]
        assert dict(planned.files)["config.json"] == dict(result.files)["config.json"] == len(written)
        record = parse_manifest((out / "ckpt_manifest.json").read_bytes()).assets["config.json"]
        assert record.nbytes == len(written)
        assert api.verify(out).findings == ()
        assert (model / "config.json").read_bytes() == CONFIG


def test_dtype_of_the_written_config_is_what_transformers_takes(model: Path, tmp_path: Path) -> None:
    api.shard(model, tmp_path / "run", mesh="dp_shard=2", dtype="bf16")
    api.gather(tmp_path / "run", tmp_path / "out")
    assert str(AutoConfig.from_pretrained(tmp_path / "out").dtype) == "torch.bfloat16"


def test_conversions_that_keep_leave_the_config_alone(model: Path, tmp_path: Path) -> None:
    for name, convert in verbs(model, tmp_path):
        result = convert(tmp_path / name)
        assert (tmp_path / name / "config.json").read_bytes() == CONFIG
        assert result.notes == ()


def test_config_of_other_assets_is_the_one_that_is_rewritten(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes(b'{"dtype":"float64"}')
    (model / "config.json").unlink()
    api.gather(model, tmp_path / "out", dtype="bf16", assets=other)
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{"dtype":"bfloat16"}'


@pytest.mark.parametrize("text", [b"dtype: float32\n", b" " * (17 << 20)], ids=["yaml", "huge"])
def test_config_that_cannot_be_read_is_refused(text: bytes, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", MODEL, assets={"config.json": text})
    with pytest.raises(UnreadableError, match="not valid JSON"):
        api.gather(model, tmp_path / "out", dtype="bf16")
    (model / "config.json").unlink()  # as the hint says
    api.gather(model, tmp_path / "out", dtype="bf16")


def test_config_is_read_alike_by_whoever_asks(tmp_path: Path) -> None:
    labels = {str(number): "x" * 100 for number in range(12_000)}  # 1.4 MB, as of models with many classes
    text = json.dumps({"architectures": ["A", "B"], "id2label": labels, "time_step_limit": [0.0, float("inf")]})
    (tmp_path / "config.json").write_text(text)
    with LocalSource(str(tmp_path)) as source:
        found = [read_config(str(tmp_path)), read_config(str(tmp_path / "config.json")), config_in(source)]
        found.append(config_beside(source) or found[0])
    assert all(one.where == str(tmp_path / "config.json") and one.architecture == "A" for one in found)
    assert all(one.values == json.loads(text) for one in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"[" * 99999, "nested too deep"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b"\xff{}", "config.json is not UTF-8 text"),
        (b"[]", "config.json is not a JSON object"),
    ],
)
def test_config_that_is_none_is_refused_in_the_same_words(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with LocalSource(str(tmp_path)) as source:
        for read in (lambda: read_config(str(tmp_path)), lambda: config_in(source), lambda: config_beside(source)):
            with pytest.raises(UnreadableError, match=words) as caught:
                read()
            assert caught.value.where == str(tmp_path / "config.json")


def test_config_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with LocalSource(str(tmp_path)) as source:
        for read in (lambda: read_config(str(tmp_path)), lambda: config_beside(source)):
            with pytest.raises(LimitError):
                read()


def test_config_that_is_not_there_is_told_apart_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    with LocalSource(str(tmp_path)) as source:
        assert config_beside(source) is None
        with pytest.raises(UnreadableError, match="missing"):
            config_in(source)
        (tmp_path / "config.json").mkdir()
        with pytest.raises(UnreadableError, match="not a regular file"):
            config_beside(source)
    with pytest.raises(UsageError, match="cannot read the model's config: no such file") as caught:
        read_config(str(tmp_path / "no.json"), hint="look again")
    assert caught.value.hint == "look again"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"architectures": ["A"], "_class_name": "B"}, "A"),
        ({"architectures": [], "_class_name": "B"}, "B"),
        ({"architectures": "A"}, None),
        ({"architectures": [3]}, None),
        ({}, None),
    ],
)
def test_architecture_is_what_either_library_calls_it(values: dict[str, object], name: str | None) -> None:
    assert parse_config(json.dumps(values).encode(), where="config.json").architecture == name
