"""Models that transformers itself cuts with tp_plan="auto": what ckpt writes loads into them, to the last bit."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from forked import forked_children
from fsdp2.ranks import run_ranks
from names import zoo
from names.test_zoo_ranks import inputs_of
from seeds import guide
from torch.distributed.tensor import DTensor

from ckpt_tools import open_checkpoint
from ckpt_tools.cli import main
from ckpt_tools.fsdp2 import load_checkpoint
from ckpt_tools.fsdp2.local import local_boxes

parallel = pytest.importorskip("transformers.distributed", reason="transformers before 5.20 cuts in another way")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_EXPERTS = "model.layers.*.mlp.experts.gate_up_proj"
ARCHITECTURES = {
    "LlamaForCausalLM": [],  # a vocabulary of 99, which two ranks do not divide
    "Qwen3ForCausalLM": [],  # norms of heads
    "Gemma3ForCausalLM": [],  # a tied head
    "Phi3ForCausalLM": [],  # q, k and v in one matrix
    "Qwen2_5_VLForConditionalGeneration": [],  # a vision tower
    "LlavaForConditionalGeneration": [],  # a vision tower of another architecture
    "GptOssForCausalLM": [],  # attention sinks, biases of experts
    "MixtralForCausalLM": [_EXPERTS],
    "Qwen3MoeForCausalLM": [_EXPERTS],
    "Glm4MoeForCausalLM": [_EXPERTS],  # shared experts
    "DeepseekV3ForCausalLM": [_EXPERTS],  # latent attention
    "AriaTextForCausalLM": [_EXPERTS],  # packed along the last dim
    "AriaForConditionalGeneration": [_EXPERTS.replace("model.", "model.language_model.")],  # and a vision tower
}
"""Architecture → what stock PyTorch 2.13 misreads. When it reads one right this fails: the warning may go then."""
_CHANGES = {
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
}
"""What small models need besides, to compute anything."""
_TOLERANCE = 1e-5
"""Of logits: two ranks add partial sums in another order."""


def load_stock(model, path):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)


def load_by_the_guide(model, path):
    with contextlib.chdir(Path(path).parents[1]):
        guide.run("start-sharded", "packed", {"model": model})


LOADS = {"stock": load_stock, "guide": load_by_the_guide, "ckpt": load_checkpoint}


def merged(values, changes):
    """Return nested `values` with what `changes` says."""
    return values | {
        key: merged(values[key], value) if isinstance(value, dict) else value for key, value in changes.items()
    }


def parts_of(model):
    """Return name → what this rank has of it, and how it is cut."""
    parts = {}
    for name, tensor in model.state_dict().items():
        is_cut = isinstance(tensor, DTensor)
        parts[name] = (tensor.to_local() if is_cut else tensor).clone(), str(tensor.placements) if is_cut else ""
    return parts


def differing(parts, others):
    """Return the names of what is not the same, with * for numbers."""
    wrong = [
        fqn for fqn, (part, cut) in parts.items() if cut != others[fqn][1] or not torch.equal(part, others[fqn][0])
    ]
    return sorted({re.sub(r"\.\d+\.", ".*.", fqn) for fqn in wrong})


def elsewhere(model, path):
    """Return the names of what this rank does not find as one chunk of the checkpoint, with * for numbers."""
    chunks = {entry.fqn: {chunk.box for chunk in entry.chunks} for entry in open_checkpoint(path).tensors}
    state = model.state_dict()
    names = [fqn for fqn, tensor in state.items() if not set(local_boxes(tensor)[1]) <= chunks[fqn]]
    return sorted({re.sub(r"\.\d+\.", ".*.", fqn) for fqn in names})


def fill_with_noise(model):
    with torch.no_grad():
        for tensor in model.parameters():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).normal_()


def sharded(name, config, directory, options):
    """A model on the hub, sharded by ckpt; return what that warned of."""
    torch.manual_seed(0)
    model = zoo.build(name, config, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory / "hub")
    with contextlib.redirect_stderr(io.StringIO()) as said, forked_children():
        assert main(["shard", str(directory / "hub"), str(directory / "run/start"), "-q", *options]) == 0, (
            said.getvalue()
        )
    return said.getvalue()


def shard_alone(rank, world_size, name, directory):
    config = merged(zoo.small_config(name), _CHANGES.get(name, {}))
    return sharded(name, config, directory, ["--mesh", "tp=2", "--tp-plan", "auto"])


def walk(rank, world_size, name, directory, sizes, options, changes):
    """Return what is wrong after each way to load, and what the command warned of."""
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    config = merged(merged(zoo.small_config(name), _CHANGES.get(name, {})), changes)
    said = sharded(name, config, directory, options) if rank == 0 else ""
    dist.barrier()
    kind = getattr(transformers, name)
    reference = kind.from_pretrained(directory / "hub").eval()
    model = kind.from_pretrained(directory / "hub", distributed_config=parallel.DistributedConfig(**sizes)).eval()
    truth = parts_of(model)
    found = {"elsewhere": elsewhere(model, directory / "run/start")}
    for how, load in LOADS.items():
        fill_with_noise(model)
        load(model, directory / "run/start")
        found[how] = differing(truth, parts_of(model))
    with torch.no_grad():
        ours, theirs = (one(**inputs_of(reference)).logits for one in (model, reference))
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return found, float((ours - theirs).abs().max()), said


def assert_loads(results, *, packed, uneven=()):
    """Every way gives what transformers loads; the stock one all but what was warned of. Chunks are what ranks have."""
    said = results[0][2]
    for found, difference, _ in results:
        assert found["guide"] == found["ckpt"] == []
        assert found["stock"] == packed
        assert found["elsewhere"] == sorted([*packed, *uneven])
        assert difference < _TOLERANCE
    assert ("packed tensors" in said) == bool(packed)
    assert "joins or splits" not in said
    for name in packed:
        assert re.search(re.escape(name).replace(r"\*", r"\d+"), said)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_that_transformers_cuts_loads_what_shard_wrote(name, tmp_path):
    options = ["--mesh", "tp=2", "--tp-plan", "auto"]
    results = run_ranks(2, walk, name, tmp_path, {"tp_size": 2}, options, {}, timeout=120)
    assert_loads(results, packed=ARCHITECTURES[name])


@pytest.mark.parametrize(
    ("name", "options", "changes", "uneven"),
    [
        ("Qwen3ForCausalLM", [], {"vocab_size": 96}, []),
        ("MixtralForCausalLM", [], {"vocab_size": 96}, []),
        ("LlamaForCausalLM", ["--tp-uneven", "replicate"], {}, ["lm_head.weight", "model.embed_tokens.weight"]),
    ],
)
def test_model_that_transformers_cuts_and_shards_loads_what_shard_wrote(name, options, changes, uneven, tmp_path):
    options = ["--mesh", "dp_shard=2,tp=2", "--tp-plan", "auto", *options]
    results = run_ranks(4, walk, name, tmp_path, {"tp_size": 2, "fsdp_size": 2}, options, changes, timeout=120)
    assert_loads(results, packed=ARCHITECTURES[name], uneven=uneven)


def test_experts_that_transformers_cuts_by_number_load_in_every_way(tmp_path):
    options = ["--mesh", "tp=2", "--tp-plan", "auto"]
    results = run_ranks(2, walk, "MixtralForCausalLM", tmp_path, {"tp_size": 2, "ep_size": 2}, options, {}, timeout=120)
    for found, difference, _ in results:
        assert [found[how] for how in LOADS] == [[], [], []]
        assert difference < _TOLERANCE


def save_by_the_guide(rank, world_size, name, directory):
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    if rank == 0:
        sharded(name, zoo.small_config(name), directory, ["--mesh", "tp=2", "--tp-plan", "auto"])
    dist.barrier()
    config = parallel.DistributedConfig(tp_size=world_size)
    model = getattr(transformers, name).from_pretrained(directory / "hub", distributed_config=config)
    with contextlib.suppress(dcp.api.CheckpointException):  # no Exception
        dcp.save(model.state_dict(), checkpoint_id=directory / "refused")
    with contextlib.chdir(directory):
        guide.run("start-sharded", "packed-save", guide.run("start-sharded", "packed", {"model": model}))


def test_experts_in_one_run_are_saved_and_come_back(tmp_path):
    run_ranks(2, save_by_the_guide, "MixtralForCausalLM", tmp_path, timeout=120)
    hub, step, whole, out = (str(tmp_path / name) for name in ("hub", "run/step-1", "run/whole", "out"))
    assert not (tmp_path / "refused" / ".metadata").exists()
    assert main(["gather", step, out, "--assets", hub, "-q"]) == 2
    assert main(["reshard", step, whole, "--mesh", "dp_shard=1", "-q"]) == 0
    assert main(["gather", whole, out, "--assets", hub, "-q"]) == 0
    assert main(["diff", hub, out, "-q"]) == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Inkling2ForCausalLM", "model.layers.0.mlp.experts.gate_up_proj"),  # rows of gate and up in turn
        ("Step3p7ForConditionalGeneration", "model.language_model.layers.3.mlp.experts.gate_up_proj"),  # stacks of them
        ("HrmTextForCausalLM", "model.H_module.layers.0.self_attn.gate_proj.weight"),  # a part of a larger matrix
    ],
)
def test_tensors_that_transformers_cuts_before_it_joins_them_are_warned_of(name, what, tmp_path):
    (said,) = run_ranks(1, shard_alone, name, tmp_path, backend=None)
    assert "from_pretrained" in said
    assert f"joins or splits {what}" in said


TORCHRUN = """
import sys
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, transformers
from torch.distributed.tensor import DTensor
from names.test_zoo_ranks import inputs_of

for directory in map(Path, sys.argv[1:]):
    kind = getattr(transformers, directory.name)
    reference = kind.from_pretrained(directory / "hub").eval()
    model = kind.from_pretrained(directory / "hub", tp_plan="auto").eval()
    cut = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(7.0)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=directory / "run/start")
        model.load_state_dict(state)
        ours, theirs = (one(**inputs_of(reference)).logits for one in (model, reference))
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    difference = float((ours - theirs).abs().max())
    print(f"RESULT {directory.name} rank {dist.get_rank()} {cut > 0} {difference:.1e}", flush=True)
dist.destroy_process_group()
"""


def test_models_under_torchrun_with_tp_plan_auto_read_what_shard_wrote(tmp_path, request):
    names = [name for name, packed in ARCHITECTURES.items() if not packed and name != "LlavaForConditionalGeneration"]
    if not request.config.getoption("--zoo"):
        pytest.skip("the same models are under run_ranks, above (bin/test --zoo)")
    for name in names:
        run_ranks(1, shard_alone, name, tmp_path / name, backend=None)
    script = tmp_path / "read.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *(str(tmp_path / name) for name in names)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: a line may begin behind another one.
    results = re.findall(r"RESULT (\w+) rank (\d) (True|False) (\d\.\de[+-]\d\d)", done.stdout)
    assert sorted((name, rank) for name, rank, *_ in results) == sorted((n, r) for n in names for r in "01")
    assert all(cut == "True" and float(difference) < _TOLERANCE for *_, cut, difference in results), results
