"""`ckpt estimate` as it is called: its answers, its exit codes, its own time and memory."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys
from estimate.steps import CONFIG
from forked import call, main as main_forked

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError

pytest.importorskip("transformers")

LLAMA_7B = CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
GIB = 1 << 30
FIGURES = ["--params", "7B", "--layers", "32", "--hidden", "4096"]


def write(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_weights(path, shapes):
    """A safetensors file with holes for data."""
    header, position = {}, 0
    for name, shape in shapes.items():
        nbytes = 2
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + position)


def test_dtype_of_frozen_parameters_where_none_are_frozen_is_refused(capsys):
    assert main(["estimate", *FIGURES, "--frozen-dtype", "f32"]) == 2
    assert "--frozen-dtype needs --lora" in capsys.readouterr().err
    assert main(["estimate", *FIGURES, "--frozen-dtype", "f32", "--lora"]) == 0


@pytest.mark.full
def test_llama_7b_takes_half_a_minute_and_less_than_a_gigabyte(tmp_path):
    model = write(tmp_path / "llama", LLAMA_7B)
    script = (
        "import json, sys; from ckpt_tools import api; from ckpt_tools.memory import peak_rss_bytes;"
        "found = api.estimate(sys.argv[1], mesh='dp_shard=8');"
        "print(json.dumps(found.to_json() | {'caller': peak_rss_bytes(), 'torch': 'torch' in sys.modules}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script, str(model)], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    # Both processes have one thread; seconds on the clock also depend on who else computes on this machine.
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 30
    assert found["peak_rss_bytes"] + found["caller"] < 10**9
    assert not found["torch"]
    (case,) = found["strategies"]
    assert case["method"] == "tracked"
    assert found["params"] == 6738415616
    # Parameters in f32, an eighth; gradients and two moments follow. The peak is that of docs/dev/calibration.md.
    assert found["per_rank"]["params"] == pytest.approx(6738415616 * 4 / 8, rel=1e-6)
    assert found["per_rank"]["grads"] == 6738415616 * 4 // 8
    assert found["per_rank"]["optimizer"] == pytest.approx(6738415616, rel=1e-6)
    assert found["per_rank"]["peak"] / GIB == pytest.approx(23.0, rel=0.02)
    assert abs(case["difference"]) < 0.05


@pytest.mark.full
def test_ways_are_counted_while_they_are_traced(tmp_path):
    said = []

    def hear(text):
        said.append(text)
        if text == "tracing change 1":
            raise KeyboardInterrupt

    shape = {"world_size": 2, "seq_len": 64, "strategy": ["full_shard", "shard_grad_op"]}
    with pytest.raises(KeyboardInterrupt):
        api.estimate(write(tmp_path / "model", CONFIG), **shape, gpu_memory="1129MiB", on_case=hear)
    assert list(dict.fromkeys(said)) == ["tracing 1 of 2 ways", "tracing 2 of 2 ways", "tracing change 1"]


@pytest.mark.full
def test_nothing_fits_exits_3_and_the_advice_fits_when_followed(tmp_path, capsys):
    model = write(tmp_path / "model", CONFIG)
    # What the device needs for itself is 1128 MiB; that leaves 12 MiB for a model that takes 20.
    limit = "1142MiB"
    shape = ["--mesh", "dp_shard=2", "--seq-len", "256", "--batch-size", "2", "--gpu-memory", limit, "--json"]
    assert main_forked(["estimate", str(model), *shape]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["advice"] == found["proposals"][-1]
    assert [proposal["fits"] for proposal in found["proposals"][:-1]] == [False] * (len(found["proposals"]) - 1)
    words = found["advice"]["what"].split()
    changed = {word for word in words if word.startswith("--")}
    kept = [part for i in range(0, 8, 2) if shape[i] not in changed for part in shape[i : i + 2]]
    assert main_forked(["estimate", str(model), *kept, *words, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["fits"] is True
    assert again["strategies"][0]["needed"] == found["advice"]["needed"]


def test_figures_alone_are_answered_by_the_formula_and_said_so(capsys):
    assert main(["estimate", *FIGURES, "--strategy", "all", "--gpu-memory", "80GB"]) == 0
    shown = capsys.readouterr().out
    assert "by the formula: there is no config.json" in shown
    assert "fits in 80 GB" in shown
    *lines, last = (line for line in shown.splitlines() if "dp_" in line)
    assert re.fullmatch(
        r"recommended: shard_grad_op on dp_shard=8: peak [\d.]+ GiB and margin [\d.]+ GiB of 80 GB \(74.5 GiB\); .*",
        last,
    )
    rows = [line.split() for line in lines]
    assert len(rows) == 8
    assert {row[0]: row[-1] for row in rows}["no_shard"] == "no"


def test_figures_json_has_every_field_of_the_contract(capsys):
    assert main(["estimate", *FIGURES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert found["fits"] is None
    assert {"params", "grads", "optimizer", "activations", "gathered", "peak"} <= set(found["per_rank"])
    assert [case["strategy"] for case in found["strategies"]] == ["full_shard"]
    assert found["strategies"][0]["method"] == "formula"


def test_figures_proposals_go_from_cheap_to_dear_until_one_fits():
    found = api.estimate(params=70 * 10**9, layers=80, hidden=8192, mesh="dp_shard=8", gpu_memory="80GB")
    assert [proposal.what for proposal in found.proposals] == [
        "--activation-checkpointing",
        "--activation-checkpointing --mesh dp_shard=16",
        "--activation-checkpointing --mesh dp_shard=32",
    ]
    assert found.advice is found.proposals[-1]
    assert found.advice.estimate.needed <= 80 * 10**9 < found.proposals[-2].estimate.needed


@pytest.mark.parametrize("mesh", [None, "dp_replicate=2,dp_shard=-1"])
def test_proposals_have_the_ranks_that_were_given(mesh):
    sizes = {"params": "70B", "layers": 80, "hidden": 8192}
    found = api.estimate(**sizes, mesh=mesh, world_size=8, gpu_memory="80GB")
    assert {each.estimate.case.mesh.world_size for each in found.proposals} == {8}
    assert "--mesh" not in found.advice.what


def test_nothing_helps_is_said(capsys):
    assert main(["estimate", *FIGURES, "--gpu-memory", "1GB"]) == 3
    assert "none of the changes tried fits" in capsys.readouterr().out


@pytest.mark.full
def test_weights_without_config_are_answered_from_their_headers(tmp_path):
    shapes = {"embed.weight": (100, 64)}
    for number in range(3):
        shapes |= {f"layers.{number}.up.weight": (256, 64), f"layers.{number}.down.weight": (64, 256)}
    write_weights(tmp_path / "model.safetensors", shapes)
    found = call(api.estimate, tmp_path / "model.safetensors")
    assert found.params == 100 * 64 + 3 * 2 * 256 * 64
    assert found.cases[0].tracked is None
    (tmp_path / "config.json").write_text('{"_class_name": "SomeTransformer2DModel"}')  # one of diffusers
    assert call(api.estimate, tmp_path).params == found.params


@pytest.mark.full
def test_model_that_cannot_run_without_data_falls_back_and_says_why(tmp_path):
    config = toys.config_of("llava", architectures=["LlavaForConditionalGeneration"])
    model = write(tmp_path / "llava", json.loads(config.to_json_string(use_diff=False)))
    found = call(api.estimate, model, mesh="dp_shard=2", seq_len=64)
    (case,) = found.cases
    assert case.tracked is None
    assert "cannot run without data" in case.why_not_tracked
    assert case.per_rank is case.formula


def test_old_torch_is_named_as_the_reason():
    from ckpt_tools.estimate.track import refuse_torch

    assert refuse_torch() is None
    assert "2.5.1+cpu is older than 2.10" in refuse_torch("2.5.1+cpu")


@pytest.mark.parametrize(
    ("config", "error", "what"),
    [
        ("{", UnreadableError, "not valid JSON"),
        ("[]", UnreadableError, None),  # as if there were none, and no weights either
        pytest.param('{"architectures": ["NoSuchModel"]}', UsageError, "no model class", marks=pytest.mark.full),
        pytest.param(
            json.dumps(CONFIG | {"quantization_config": {"bits": 4}}), UsageError, "quantised", marks=pytest.mark.full
        ),
        pytest.param(
            json.dumps(CONFIG | {"num_attention_heads": 0}), UsageError, "does not describe", marks=pytest.mark.full
        ),
    ],
)
def test_config_that_builds_nothing_is_an_error(tmp_path, config, error, what):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=what) as caught:
        call(api.estimate, tmp_path)
    assert "--factory" not in (caught.value.hint or ""), "an option of another command"
    assert not getattr(caught.value, "__notes__", []), "a traceback of the child"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["nowhere"], 2),
        (["--params", "many", "--layers", "2", "--hidden", "3"], 2),
        ([*FIGURES, "--gpu-memory", "huge"], 2),
        ([*FIGURES, "--strategy", "fast"], 2),
        ([*FIGURES, "--quantize", "nf4"], 2),
        ([*FIGURES, "--mesh", "xp=2"], 2),
        (["--params", "1K", "--layers", "2", "--hidden", "300"], 2),
    ],
)
def test_cli_what_cannot_be_meant_exits_2(arguments, code, capsys):
    assert main(["estimate", *arguments]) == code
    assert capsys.readouterr().err.startswith("error: ")


def test_empty_directory_is_not_a_checkpoint(tmp_path, capsys):
    assert main(["estimate", str(tmp_path)]) == 4
    assert "hint" in capsys.readouterr().err


@pytest.mark.full
def test_interrupted_estimate_leaves_nothing(tmp_path):
    model = write(tmp_path / "llama", LLAMA_7B)
    private = tmp_path / "tmp"
    private.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", "estimate", str(model)],
        env=os.environ | {"TMPDIR": str(private)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not list(private.glob("*/log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert not list(private.iterdir())
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(private).encode() in command for command in commands)
