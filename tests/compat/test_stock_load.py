"""PyTorch and transformers read what ckpt writes, without a line of ours in between."""

from __future__ import annotations

import json
import math
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import toys
import transformers
from compat.world import models
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file
from samples import without_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, distribute_tensor

from ckpt_tools import api
from ckpt_tools.cli import main

CHECKPOINTS = {  # name → root of the state dict
    "shard-dp8": "",
    "shard-dp2-tp2": "",
    "shard-hsdp": "",
    "shard-prefix": "model",
    "reshard-dp8-to-dp2-tp2": "",
    "reshard-dp2-tp2-to-dp3": "",
    "reshard-dp8-to-columns": "",
    "hf-dp2-tp2": "",
}
MESHES = (*({"dp_shard": n} for n in (1, 2, 4)), {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


def name_of(axes):
    return "-".join(f"{axis}{size}" for axis, size in axes.items())


def save_model(model, directory, **options):
    """`save_pretrained`, whose progress bar does not belong here."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **options)


PLAN = ("--set", "**.{q,k,v,gate,up}_proj.weight=tp:S(0)", "--set", "**.{o,down}_proj.weight=tp:S(1)")
"""What `--tp-plan auto` finds for the layers, without the process that asks transformers."""


SAFETENSORS = ("--serialization", "safetensors")


def parse_safetensors(path):
    """Header, with DCP's own JSON in it parsed too, and data; torch writes the strings of the header in any order."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    head["__metadata__"]["DCP_SHARDING_INFO"] = json.loads(head["__metadata__"]["DCP_SHARDING_INFO"])
    return head, raw[8 + length :]


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_model(models.llama(), directory)
    return directory


@pytest.fixture(scope="module")
def written(llama_dir, tmp_path_factory):
    """Every checkpoint of `CHECKPOINTS`, written through the command line."""
    out = tmp_path_factory.mktemp("written")

    def ckpt(verb, source, name, *options):
        assert main([verb, str(source), str(out / name), *options, "--quiet"]) == 0

    # The plan cuts the head too, whose 33 rows two ranks cannot share.
    tp = ("--tp-plan", "auto", "--set", "lm_head.weight=", "--set", "model.embed_tokens.weight=")
    ckpt("shard", llama_dir, "shard-dp8", "--mesh", "dp_shard=8")
    ckpt("shard", llama_dir, "shard-dp2-tp2", "--mesh", "dp_shard=2,tp=2", *tp)
    ckpt("shard", llama_dir, "shard-hsdp", "--mesh", "dp_replicate=2,dp_shard=3")
    ckpt("shard", llama_dir, "shard-prefix", "--mesh", "dp_shard=2", "--prefix", "model.")
    ckpt("reshard", out / "shard-dp8", "reshard-dp8-to-dp2-tp2", "--mesh", "dp_shard=2,tp=2", *PLAN)
    ckpt("reshard", out / "shard-dp2-tp2", "reshard-dp2-tp2-to-dp3", "--mesh", "dp_shard=3")
    ckpt("reshard", out / "shard-dp8", "hf-dp2-tp2", "--mesh", "dp_shard=2,tp=2", *PLAN, *SAFETENSORS)
    columns = "**.{q,k,v,o,gate,up,down}_proj.weight=dp_shard:S(1)"
    ckpt("reshard", out / "shard-dp8", "reshard-dp8-to-columns", "--mesh", "dp_shard=4", "--set", columns)
    return out


def load_case(case):
    """Return what is wrong after stock `dcp.load` into a spread model."""
    model = models.spread(models.llama(seed=1), **case["axes"])
    expected = load_file(case["reference"])
    state = model.state_dict()
    items = Path(case["checkpoint"], ".metadata").exists()
    reader = None if items else dcp.HuggingFaceStorageReader(case["checkpoint"])
    where = {"checkpoint_id": case["checkpoint"]} if items else {"storage_reader": reader}
    dcp.load({case["root"]: state} if case["root"] else state, **where)
    if "save" in case:
        writer = dcp.HuggingFaceStorageWriter(case["save"], save_distributed=True)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(state, storage_writer=writer, planner=planner)
    wrong = sorted(state.keys() ^ expected.keys())
    for fqn, tensor in state.items():
        assert isinstance(tensor, DTensor), fqn
        part = distribute_tensor(expected[fqn], tensor.device_mesh, tensor.placements, src_data_rank=None)
        ours, theirs = tensor.to_local().contiguous(), part.to_local().contiguous()
        if ours.dtype != theirs.dtype or ours.numpy().tobytes() != theirs.numpy().tobytes():
            wrong.append(fqn)
    return wrong


def load_cases(rank, world_size, cases):
    """Return what this rank found wrong, by name; a case is what `loaded` makes of it."""
    found = {}
    for case in cases:
        dist.barrier()
        try:
            found[case["name"]] = load_case(case)
        except BaseException:  # dcp's CheckpointException is one
            found[case["name"]] = [traceback.format_exc()]
    return found


@pytest.fixture(scope="module")
def loaded(written, llama_dir, tmp_path_factory):
    """Per checkpoint and mesh, what real ranks found wrong after `dcp.load`."""
    reference = str(llama_dir / "model.safetensors")
    cases = [
        {"name": f"{name}@{name_of(axes)}", "checkpoint": str(written / name), "reference": reference}
        | {"root": root, "axes": axes}
        for name, root in CHECKPOINTS.items()
        for axes in MESHES
    ]
    directory = tmp_path_factory.mktemp("loaded")
    for case in cases:
        if case["name"] == "hf-dp2-tp2@dp_shard2-tp2":  # loaded on the mesh that it was written for, and saved by torch
            case["save"] = str(written / "by-torch")
    # The control: the comparison must notice when it is compared with another model.
    save_model(models.llama(seed=5), directory / "other")
    cases.append(cases[1] | {"name": "control", "reference": str(directory / "other" / "model.safetensors")})
    found = {}
    for size in {math.prod(case["axes"].values()) for case in cases}:
        group = [case for case in cases if math.prod(case["axes"].values()) == size]
        for result in run_ranks(size, load_cases, group, timeout=200):
            for name, wrong in result.items():
                found[name] = found.get(name, []) + wrong
    return found


@pytest.mark.full
@pytest.mark.parametrize("axes", MESHES, ids=name_of)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_dcp_load_into_spread_model_is_bitwise_equal(loaded, name, axes):
    assert loaded[f"{name}@{name_of(axes)}"] == []


@pytest.mark.full
def test_dcp_load_control_of_another_model_is_noticed(loaded):
    assert {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"} < set(loaded["control"])


@pytest.mark.full
def test_safetensors_of_ranks_are_those_that_torch_writes(loaded, written):
    ours, theirs = (sorted(written.joinpath(name).glob("*.safetensors")) for name in ("hf-dp2-tp2", "by-torch"))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert len(ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        (head, data), (their_head, their_data) = parse_safetensors(one), parse_safetensors(other)
        assert data == their_data
        assert list(head) == list(their_head)  # tensors in the same order
        assert head == their_head


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if not name.startswith("hf-")])
def test_dcp_load_without_process_group_is_bitwise_equal(written, llama_dir, assert_same, name):
    expected = load_file(llama_dir / "model.safetensors")
    state = {fqn: torch.full_like(tensor, torch.nan) for fqn, tensor in expected.items()}
    with without_ranks():
        root = CHECKPOINTS[name]
        dcp.load({root: state} if root else state, checkpoint_id=written / name, no_dist=True)
    assert_same(state, expected)


@pytest.mark.full
def test_dcp_to_torch_save_gives_the_original_tensors(written, llama_dir, tmp_path, assert_same):
    expected = load_file(llama_dir / "model.safetensors")
    with without_ranks():
        for name in ("shard-dp8", "reshard-dp8-to-dp2-tp2"):
            dcp_to_torch_save(written / name, tmp_path / "full.pt")
            assert_same(torch.load(tmp_path / "full.pt", weights_only=True), expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ["shard-dp2-tp2", "reshard-dp8-to-columns"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["as-it-was", "many-files"])
def test_from_pretrained_after_gather_gives_equal_logits(written, llama_dir, tmp_path, name, options):
    api.gather(written / name, tmp_path / "back", **options)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert (len(files) > 1) == bool(options)
    original, back = (transformers.LlamaForCausalLM.from_pretrained(path) for path in (llama_dir, tmp_path / "back"))
    assert torch.equal(models.logits(original.eval()), models.logits(back.eval()))


@pytest.mark.full
def test_from_pretrained_after_gather_as_bf16_equals_torch_cast(written, llama_dir, tmp_path):
    api.gather(written / "shard-dp8", tmp_path / "back", dtype="bf16")
    original = transformers.LlamaForCausalLM.from_pretrained(llama_dir).to(torch.bfloat16)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert torch.equal(models.logits(original.eval()), models.logits(back.eval()))


@pytest.mark.parametrize("max_shard_size", [None, "2KB"], ids=["as-it-was", "many-files"])
def test_from_pretrained_of_tied_bert_gives_equal_logits(tmp_path, max_shard_size):
    save_model(toys.build("bert", **models.BERT), tmp_path / "bert")
    api.shard(tmp_path / "bert", tmp_path / "dcp", mesh="dp_shard=3")
    api.reshard(tmp_path / "dcp", tmp_path / "dcp2", mesh="dp_replicate=2,dp_shard=2")
    api.gather(tmp_path / "dcp2", tmp_path / "back", max_shard_size=max_shard_size)
    original, back = (transformers.BertForMaskedLM.from_pretrained(tmp_path / name) for name in ("bert", "back"))
    assert back.cls.predictions.decoder.weight is back.bert.embeddings.word_embeddings.weight
    assert torch.equal(models.logits(original.eval()), models.logits(back.eval()))
