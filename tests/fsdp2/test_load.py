"""Loading into plain models of one process: names, ties, dtypes, buffers, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from fsdp2 import models
from fsdp2.ranks import run_ranks
from names import zoo
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from ckpt_tools import api
from ckpt_tools.checkpoint.names import load_table
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.fsdp2 import load_checkpoint, local_box, materialise_buffers
from ckpt_tools.fsdp2.internals import StridedShard
from ckpt_tools.fsdp2.names import architecture_of


class Net(nn.Module):
    """Two layers, a persistent and a computed buffer, and optionally a tie."""

    def __init__(self, tied=False, computes=True):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(4.0) + 1, persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("ids", torch.arange(3), persistent=False)
        if computes:
            self.init_buffers = self._compute

    def _compute(self):
        self.scale.copy_(torch.arange(4.0) + 1)
        self.mask.copy_(torch.tensor([True, False]))
        self.ids.copy_(torch.arange(3))


def on_meta(**options):
    with torch.device("meta"):
        return Net(**options)


@pytest.fixture
def saved(tmp_path):
    """A model, and its state as a file in a directory of its own."""
    torch.manual_seed(3)
    model = Net()
    model.norm.running_mean.fill_(0.25)
    path = tmp_path / "saved"
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    return model, path


def assert_equal(model, expected):
    state = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_state_and_buffers_are_those_of_the_file(saved):
    expected, path = saved
    model = on_meta()
    report = load_checkpoint(model, path)
    assert_equal(model, expected)
    assert report.buffers == ("scale", "mask", "ids")
    for name in report.buffers:
        assert torch.equal(model.get_buffer(name), expected.get_buffer(name))
    assert report.loaded_bytes == sum(t.nbytes for t in expected.state_dict().values())
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters_stay_frozen(saved):
    model = on_meta()
    model.head.requires_grad_(False)
    load_checkpoint(model, saved[1])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


@pytest.mark.parametrize("root", ["module.", "model.", "a.b.", "_orig_mod."])
def test_root_of_the_names_is_found(saved, tmp_path, root):
    expected, path = saved
    api.shard(path, tmp_path / "dcp", mesh="dp_shard=2", prefix=root)
    model = on_meta()
    load_checkpoint(model, tmp_path / "dcp")
    assert_equal(model, expected)
    if root != "_orig_mod.":
        again = on_meta()
        load_checkpoint(again, tmp_path / "dcp", prefix=root)
        assert_equal(again, expected)


def test_root_that_the_model_has_is_added(saved):
    expected, path = saved

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = on_meta()

    outer = Outer()
    report = load_checkpoint(outer, path)
    assert not report.missing
    assert_equal(outer.inner, expected)


def test_prefix_that_nothing_has_is_refused(saved):
    with pytest.raises(UsageError, match=r"no tensor name in the checkpoint starts with 'x\."):
        load_checkpoint(on_meta(), saved[1], prefix="x.")


def test_missing_and_unexpected_names_are_told_together(saved):
    state = load_file(saved[1] / "model.safetensors")
    state["heads.weight"] = state.pop("head.weight")
    save_file(state, saved[1] / "model.safetensors")
    with pytest.raises(UnreadableError, match=r"1 missing: head.weight; 1 unexpected: heads.weight") as caught:
        load_checkpoint(on_meta(), saved[1])
    assert "heads.weight" in caught.value.hint
    model = on_meta()
    report = load_checkpoint(model, saved[1], strict=False)
    assert (report.missing, report.unexpected) == (("head.weight",), ("heads.weight",))
    assert model.head.weight.is_meta
    assert not model.embed.weight.is_meta


def test_checkpoint_of_another_model_is_refused_with_a_hint(saved, tmp_path):
    (tmp_path / "other").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(UnreadableError, match="does not match the model") as caught:
        load_checkpoint(on_meta(), tmp_path / "other")
    assert "another model's checkpoint" in caught.value.hint


def test_other_shapes_are_refused_before_anything_is_replaced(saved):
    with torch.device("meta"):
        model = Net()
        model.head = nn.Linear(4, 7, bias=False)
    with pytest.raises(UsageError, match=r"head.weight: \[6, 4\] in the checkpoint, \[7, 4\] in the model"):
        load_checkpoint(model, saved[1])
    assert model.embed.weight.is_meta


class Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_files_of_torch_save_are_read_and_nothing_in_them_runs(tmp_path):
    model, again = Net(), on_meta()
    torch.save(model.state_dict() | {"more": Hostile(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    load_checkpoint(again, tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    torch.save(Hostile(tmp_path / "ran"), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnreadableError):
        load_checkpoint(on_meta(), tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight", "both"])
def test_tie_is_restored_from_whichever_name_is_stored(saved, stored):
    state = load_file(saved[1] / "model.safetensors")
    state["head.weight"] = state["embed.weight"].clone()
    if stored != "both":
        del state["head.weight" if stored == "embed.weight" else "embed.weight"]
    save_file(state, saved[1] / "model.safetensors")
    model = on_meta(tied=True)
    report = load_checkpoint(model, saved[1])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, saved[0].embed.weight)
    assert report.tied == ("head.weight",)


def test_persistent_buffer_that_is_missing_is_reported_and_left(saved):
    state = load_file(saved[1] / "model.safetensors")
    del state["norm.running_mean"]
    save_file(state, saved[1] / "model.safetensors")
    model = on_meta()
    report = load_checkpoint(model, saved[1], strict=False)
    assert report.missing == ("norm.running_mean",)
    assert model.norm.running_mean.is_meta


def test_tie_with_two_values_is_refused(saved):
    with pytest.raises(UsageError, match=r"the model ties 'embed\.weight' and"):
        load_checkpoint(on_meta(tied=True), saved[1])


def test_dtype_is_the_models_unless_told(saved):
    model = on_meta().bfloat16()
    load_checkpoint(model, saved[1])
    assert model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(model.embed.weight, saved[0].embed.weight.bfloat16())
    other = on_meta()
    load_checkpoint(other, saved[1], dtype=torch.float64)
    assert other.embed.weight.dtype == torch.float64
    assert other.norm.num_batches_tracked.dtype == torch.int64


def test_buffer_that_nobody_computes_is_an_error_and_stays_on_meta(saved):
    model = on_meta(computes=False)
    with pytest.raises(UsageError, match="3 buffers without a value") as caught:
        load_checkpoint(model, saved[1])
    assert "scale, mask, ids" in caught.value.what
    assert model.scale.is_meta


def test_buffer_that_is_computed_in_part_is_an_error():
    model = on_meta()
    model.norm = nn.Identity()
    model.init_buffers = lambda: (model.scale[:2].fill_(1.0), model.mask.fill_(True), model.ids.fill_(7))
    with pytest.raises(UsageError, match=r"1 buffers without a value.*: scale"):
        materialise_buffers(model, "cpu")


def test_buffers_of_a_transformers_model_leave_its_parameters_alone():
    expected = models.build("llama", "cpu")
    model = models.build("llama", "cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to("meta")
    assert materialise_buffers(model, "cpu") == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    for (name, tensor), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(tensor, other), name
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert materialise_buffers(model, "cpu") == ()


def test_head_that_the_files_of_a_base_model_lack_starts_as_from_pretrained_starts_it(tmp_path):
    full = models.build("llama", "cpu")
    full.model.save_pretrained(tmp_path)
    model = models.build("llama")
    torch.manual_seed(5)
    report = load_checkpoint(model, tmp_path)
    assert (report.missing, report.computed) == ((), ("lm_head.weight",))
    assert "a head that the checkpoint does not have starts with new random values" in report.notes[0]
    torch.manual_seed(5)
    assert_equal(model, type(full).from_pretrained(tmp_path))


def test_head_that_the_files_of_its_own_class_lack_is_missing(tmp_path):
    full = models.build("llama", "cpu")
    full.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    for strange in (False, True):
        with pytest.raises(CkptError, match=r"lm_head\.weight"):
            load_checkpoint(models.build("llama"), tmp_path)
        if not strange:  # nor is it a head of another class when nothing says so
            (tmp_path / "config.json").unlink()


@pytest.fixture
def moe(tmp_path):
    """A live model with stacked experts, its files, and what changes them."""
    model = models.build("qwen3-moe", "cpu")
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"

    def change(edit):
        state = load_file(file)
        edit(state)
        save_file(state, file)

    return model, tmp_path / "hub", change


EXPERT = "model.layers.0.mlp.experts.1."


def test_same_tensors_from_the_files_of_the_hub_and_from_what_shard_writes_of_them(moe, tmp_path):
    expected, path, _ = moe
    for names in ("live", "hub"):
        api.shard(path, tmp_path / f"dcp-{names}", mesh="dp_shard=3", names=names)
    for source in (path, tmp_path / "dcp-live", tmp_path / "dcp-hub"):
        model = models.build("qwen3-moe")
        report = load_checkpoint(model, source)
        assert_equal(model, expected)
        assert report.loaded_bytes == sum(t.nbytes for t in expected.state_dict().values())


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (
            lambda state: state.pop(EXPERT + "gate_proj.weight"),
            r"the parts of model\.layers\.0\.mlp\.experts\.gate_up_proj",
        ),
        (lambda state: state.pop(EXPERT + "down_proj.weight"), r"experts\.down_proj: \[3, .*in the model"),
        (
            lambda state: [state.pop(name) for name in list(state) if "layers.0.mlp.experts" in name and "up" in name],
            "are not complete",
        ),
        (
            lambda state: state.update({EXPERT + "up_proj.weight": torch.ones(3, 3)}),
            "tensors that are stacked differ in shape",
        ),
        (
            lambda state: state.update({"norm.weight": state["model.norm.weight"].clone()}),
            r"'model.norm.weight' and 'norm.weight' are both named 'model.norm.weight' in the model",
        ),
    ],
)
def test_experts_that_are_not_whole_are_refused(moe, edit, what):
    _, path, change = moe
    change(edit)
    model = models.build("qwen3-moe")
    with pytest.raises(UsageError, match=what):
        load_checkpoint(model, path)
    assert model.model.norm.weight.is_meta


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Own"])
def test_class_of_ones_own_gets_what_from_pretrained_gives_it(moe, name):
    """By the rules of the installed transformers, whatever the table says of a class of that name."""
    expected, path, _ = moe
    model = models.build("qwen3-moe")
    model.__class__ = type(name, (type(model),), {"__module__": "own"})
    load_checkpoint(model, path)
    assert_equal(model, expected)
    assert_equal(type(model).from_pretrained(path), expected)


def test_class_that_the_table_does_not_know_is_renamed_as_the_installed_transformers_does(tmp_path):
    config = zoo.small_config("AyaVisionForConditionalGeneration")
    assert "AyaVisionForConditionalGeneration" not in load_table().architectures
    expected = zoo.build("AyaVisionForConditionalGeneration", config, "cpu")
    expected.save_pretrained(tmp_path)
    model = zoo.build("AyaVisionForConditionalGeneration", config, "meta")
    load_checkpoint(model, tmp_path)
    assert_equal(model, expected)


def test_rules_of_the_installed_transformers_are_those_of_the_table():
    config = zoo.small_config("LlavaForConditionalGeneration")
    model = zoo.build("LlavaForConditionalGeneration", config, "meta")
    known = architecture_of(model)
    model.__class__ = type("Own", (type(model),), {"__module__": "transformers.own"})
    found = architecture_of(model)
    assert found.source == f"transformers {transformers.__version__}"
    assert [(r.kind, r.sources, r.targets) for r in found.expected.rules] == [
        (r.kind, r.sources, r.targets) for r in known.expected.rules
    ]


def test_experts_that_the_hub_stores_transposed_are_turned_where_the_models_shapes_say_so(tmp_path):
    config = zoo.small_config("Qwen3VLMoeForConditionalGeneration")
    config["text_config"]["moe_intermediate_size"] = 12
    expected = zoo.build("Qwen3VLMoeForConditionalGeneration", config, "cpu")
    expected.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file)
    api.shard(tmp_path / "hub", tmp_path / "dcp", mesh="dp_shard=2", names="hub")
    for source in ("hub", "dcp"):
        model = zoo.build("Qwen3VLMoeForConditionalGeneration", config, "meta")
        load_checkpoint(model, tmp_path / source)
        assert_equal(model, expected)


# Parameters of which a rank has several runs


def cut_packed(rank, world_size, path, dim):
    """Load a matrix of three that lie side by side along `dim`, of each of which every rank has a part."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = nn.Linear(12, 12, bias=False)
    cut = distribute_tensor(torch.zeros(12, 12), mesh, [StridedShard(dim, split_factor=3)])
    model.weight = nn.Parameter(cut)
    load_checkpoint(model, path)
    with pytest.raises(CkptError, match="not one box"):
        local_box(model.weight)
    assert model.weight.placements == cut.placements
    return model.weight.to_local()


@pytest.mark.full
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_matrices_are_loaded_as_the_ranks_have_them(tmp_path, dim):
    weight = torch.arange(144.0).reshape(12, 12)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    for rank, local in enumerate(run_ranks(2, cut_packed, tmp_path, dim)):
        parts = [matrix.chunk(2, dim)[rank] for matrix in weight.chunk(3, dim)]
        assert torch.equal(local, torch.cat(parts, dim))
