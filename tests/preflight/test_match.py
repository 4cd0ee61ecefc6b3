"""A checkpoint against the model, the mesh and the dtypes of a config: every case by real files."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import yaml
from formats.saved import save_ranks
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp, tensor as dtensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Shard, cut_tensor, parse_mesh
from ckpt_tools.preflight import match
from ckpt_tools.preflight.match import check_checkpoint, look_at_model
from ckpt_tools.preflight.model_comparison import count_reads
from ckpt_tools.preflight.model_facts import ModelFacts, read_facts
from ckpt_tools.preflight.spec import AdapterSpec, ParallelSpec, shard_mesh
from ckpt_tools.sandbox import child as children, wire
from ckpt_tools.transfer.placement.place import place_tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Llama, a Llama with shared embeddings, a mixture of experts and a BERT, as transformers saves them."""
    from smoke.makers import make

    directory = tmp_path_factory.mktemp("models")
    make(directory, "llama", "moe", "bert")
    toys.save("llama", directory / "tied", num_hidden_layers=3, tie_word_embeddings=True)
    return directory


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Compare in a copy of this process, which has imported torch; what is passed is what JSON holds."""
    from ckpt_tools.preflight import meta_model  # noqa: F401 - imported once, for all copies

    class Here(nullcontext):
        def __init__(self, function, job, answer, *, does, sandboxed):
            assert function == match.COMPARE
            assert sandboxed
            super().__init__(self)
            self.job, self.answer = job, answer

        def result(self):
            with tempfile.TemporaryDirectory() as directory:
                pid = os.fork()
                if pid == 0:
                    job = {"function": match.COMPARE, "job": json.loads(wire.dumps(self.job)), "parent": os.getppid()}
                    children.serve(directory, job)
                    os._exit(0)
                os.waitpid(pid, 0)
                return children.read_answer(directory, self.answer)

    monkeypatch.setattr(match, "Child", Here)


def spec(framework="accelerate", mesh="dp_shard=2", **fields):
    fields.setdefault("keys", {"param_dtype": "mixed_precision", "adapter": "lora_r", "resume_from": "resume"})
    parsed = None if mesh is None else parse_mesh(mesh)
    world = None if parsed is None else parsed.world_size
    return ParallelSpec(framework=framework, engine="fsdp2", mesh=parsed, world_size=world, **fields)


def codes(result, *severities):
    return [f.code for f in result.findings if f.severity in (severities or ("error", "warning"))]


def the(result, code):
    (finding,) = [f for f in result.findings if f.code == code]
    return finding


def rewritten(tmp_path, model, change):
    """A copy of a model whose tensors `change` has changed."""
    copy = tmp_path / "changed"
    shutil.copytree(model, copy)
    state = load_file(model / "model.safetensors")
    save_file(change(state) or state, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def configured(tmp_path, model, **values):
    """A directory with the config alone, changed."""
    directory = tmp_path / "config"
    directory.mkdir()
    document = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(document | values))
    return directory


def test_values_are_looked_at_as_far_as_that_is_quick(models, tmp_path, monkeypatch):
    def change(state):
        state["model.layers.1.input_layernorm.weight"][3] = float("nan")
        state["model.layers.0.mlp.up_proj.weight"].zero_()

    path = rewritten(tmp_path, models / "llama", change)
    result = check_checkpoint(str(path), spec(), model=str(models / "llama"))
    assert codes(result) == ["not-finite", "all-zero"]
    assert "model.layers.1.input_layernorm.weight" in the(result, "not-finite").what
    assert result.not_checked == ()
    monkeypatch.setattr(match, "SAMPLE_BYTES", 4096)
    result = check_checkpoint(str(path), spec(), model=str(models / "llama"))
    assert codes(result) == ["not-finite"]
    assert re.fullmatch(r"the values of \d+ of \d+ tensors .*", result.not_checked[0])


@pytest.mark.parametrize("kind", ["llama", "tied", "moe", "bert"])
def test_match_of_a_model_with_its_own_checkpoint_finds_nothing_wrong(models, kind):
    result = check_checkpoint(str(models / kind), spec(), model=str(models / kind))
    assert codes(result) == []
    assert result.ok
    assert result.not_checked == ()
    assert result.verify.ok
    assert result.verify.level == "structure"
    assert len(result.comparison.found) > 20


@pytest.mark.full
def test_match_in_a_process_of_its_own_says_the_same(models, monkeypatch):
    inside = check_checkpoint(str(models / "llama"), spec(), model=str(models / "llama"))
    monkeypatch.undo()
    assert check_checkpoint(str(models / "llama"), spec(), model=str(models / "llama")) == inside


CHANGED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("changed.yaml").read_text(encoding="utf-8"))


def changed(row, state):
    state = {name.removeprefix(row.get("strip", "")): t for name, t in state.items() if name != row.get("without")}
    state |= {name: torch.zeros(8) for name in row.get("plus", ())}
    if "packed" in row:
        state[row["packed"]] = torch.zeros(state[row["packed"]].shape, dtype=torch.uint8)
    if "head" in row:
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + row["head"]
    return state


@pytest.mark.parametrize("name", CHANGED)
def test_match_of_what_differs_says_what_and_how_bad_it_is(models, tmp_path, name):
    row = CHANGED[name]
    path = rewritten(tmp_path, models / row["model"], lambda state: changed(row, state))
    model = configured(tmp_path, models / row["model"], **row.get("config", {}))
    result = check_checkpoint(str(path), spec(), model=str(model))
    assert codes(result) == row["codes"]
    code, severity = row["finding"]
    assert the(result, code).severity == severity
    text = f"{the(result, code).what} {the(result, code).hint}"
    assert [words for words in row.get("says", ()) if words not in text] == []
    assert result.ok == all(finding.severity != "error" for finding in result.findings)


def test_match_of_another_model_says_that_nothing_agrees(models):
    result = check_checkpoint(str(models / "bert"), spec(), model=str(models / "llama"))
    assert codes(result) == ["checkpoint-missing-key"]
    assert "no tensor name of LlamaForCausalLM" in the(result, "checkpoint-missing-key").what


@pytest.mark.parametrize("prefix", ["policy.", "_orig_mod."])
def test_match_of_a_prefix_names_the_option_and_the_option_works(models, tmp_path, prefix):
    copy = rewritten(tmp_path, models / "llama", lambda state: {f"{prefix}{name}": t for name, t in state.items()})
    result = check_checkpoint(str(copy), spec(), model=str(models / "llama"))
    assert codes(result) == ["checkpoint-prefix"]
    finding = the(result, "checkpoint-prefix")
    assert finding.hint == f"ckpt gather {copy} NEW --strip-prefix {prefix}"
    assert ("wrappers" in finding.what) == (prefix == "_orig_mod.")
    api.gather(copy, tmp_path / "new", strip_prefix=prefix)
    assert codes(check_checkpoint(str(tmp_path / "new"), spec(), model=str(models / "llama"))) == []


def test_match_of_dcp_wants_the_root_of_its_trainer_and_the_proposed_command_gives_it(models, tmp_path):
    api.shard(models / "llama", tmp_path / "plain", mesh="dp_shard=2")
    plain = check_checkpoint(str(tmp_path / "plain"), spec(), model=str(models / "llama"))
    assert codes(plain) == ["checkpoint-prefix"]
    command = the(plain, "checkpoint-prefix").hint
    assert command == f"ckpt reshard {tmp_path / 'plain'} NEW --mesh dp_shard=2 --prefix model."
    api.reshard(tmp_path / "plain", tmp_path / "rooted", mesh="dp_shard=2", prefix="model.")
    assert codes(check_checkpoint(str(tmp_path / "rooted"), spec(), model=str(models / "llama"))) == []


@pytest.mark.full(but=["tied-1"])
@pytest.mark.parametrize(("kind", "num"), [("moe", 6), ("tied", 1)])
def test_match_of_dcp_wants_the_live_names_and_the_proposed_command_gives_them(models, tmp_path, kind, num):
    hub = tmp_path / "hub"
    api.shard(models / kind, hub, mesh="dp_shard=2", names="hub", prefix="model.")
    result = check_checkpoint(str(hub), spec(), model=str(models / kind))
    found = the(result, "checkpoint-naming")
    assert found.severity == "error"
    assert f"the checkpoint has other names for {num} of them: " in found.what
    assert found.hint == f"ckpt reshard {hub} NEW --mesh dp_shard=2 --names live"
    api.reshard(hub, tmp_path / "live", mesh="dp_shard=2", names="live")
    again = check_checkpoint(str(tmp_path / "live"), spec(), model=str(models / kind))
    assert "checkpoint-naming" not in codes(again)
    api.shard(models / kind, tmp_path / "new", mesh="dp_shard=2", names="live", prefix="model.")
    assert codes(check_checkpoint(str(tmp_path / "new"), spec(), model=str(models / kind))) == []


def test_match_of_transformers_names_warns_for_torchtitan(models, tmp_path):
    api.shard(models / "llama", tmp_path / "plain", mesh="dp_shard=2")
    result = check_checkpoint(str(tmp_path / "plain"), spec("torchtitan"), model=str(models / "llama"))
    assert codes(result) == ["checkpoint-naming"]


def test_match_of_torchtitans_own_names_is_said_not_to_be_checked(models, tmp_path):
    state = {"tok_embeddings.weight": torch.ones(8, 4), "layers.0.attention.wq.weight": torch.ones(4, 4)}
    (tmp_path / "titan").mkdir()
    save_file(state, tmp_path / "titan" / "model.safetensors")
    result = check_checkpoint(str(tmp_path / "titan"), spec("torchtitan"), model=str(models / "llama"))
    assert codes(result) == []
    assert any("torchtitan's names" in text for text in result.not_checked)


def test_match_of_half_precision_weights_that_are_trained_in_bfloat16_warns(models, tmp_path):
    copy = rewritten(tmp_path, models / "llama", lambda state: {name: t.half() for name, t in state.items()})
    result = check_checkpoint(str(copy), spec(param_dtype="bf16", master_dtype="f32"), model=str(models / "llama"))
    found = [f for f in result.findings if f.code == "checkpoint-dtype"]
    assert [f.severity for f in found] == ["warning", "info"]
    assert "mixed_precision computes in bf16" in found[0].what
    same = check_checkpoint(str(copy), spec(param_dtype="f16"), model=str(models / "llama"))
    assert codes(same) == []


@pytest.fixture(scope="module")
def adapted(models, tmp_path_factory):
    """A model with adapters, whole, and the adapters alone."""
    import peft
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM.from_pretrained(models / "llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    directory = tmp_path_factory.mktemp("adapted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers 5.23 has deprecated
        wrapped = peft.get_peft_model(model, config)
        wrapped.save_pretrained(directory / "adapter")
    (directory / "whole").mkdir()
    save_file({name: t.contiguous() for name, t in wrapped.state_dict().items()}, directory / "whole" / "a.safetensors")
    return directory


def test_match_of_an_adapter_for_a_config_without_one_proposes_to_merge(adapted, models):
    result = check_checkpoint(str(adapted / "adapter"), spec(), model=str(models / "llama"))
    assert codes(result) == ["checkpoint-adapter"]
    assert "ckpt merge-lora" in the(result, "checkpoint-adapter").hint
    assert "not a model" in the(result, "checkpoint-adapter").what


def test_match_of_an_adapter_of_another_rank_is_an_error(adapted, models):
    path = str(adapted / "adapter")
    wrong = check_checkpoint(path, spec(adapter=AdapterSpec(rank=8)), model=str(models / "llama"))
    assert codes(wrong) == ["checkpoint-adapter"]
    assert the(wrong, "checkpoint-adapter").what == "the adapter in the checkpoint has rank 4, but lora_r is 8"
    right = check_checkpoint(path, spec(adapter=AdapterSpec(rank=4)), model=str(models / "llama"))
    assert codes(right) == []


def test_match_finds_the_base_model_inside_of_one_with_adapters(adapted, models, tmp_path):
    with_adapter = spec(adapter=AdapterSpec(rank=4))
    whole = check_checkpoint(str(adapted / "whole"), with_adapter, model=str(models / "llama"))
    assert codes(whole) == ["checkpoint-prefix"]  # from_pretrained does not know these names
    assert len(whole.comparison.found) == 30
    assert len(whole.comparison.adapters) == 12
    # A trainer that goes on has the same names.
    api.shard(adapted / "whole", tmp_path / "run", mesh="dp_shard=2", prefix="model.")
    assert codes(check_checkpoint(str(tmp_path / "run"), with_adapter, model=str(models / "llama"))) == []


@pytest.fixture(scope="module")
def resumable(tmp_path_factory, models):
    """What accelerate leaves: the model in one directory, the optimizer in another."""
    directory = tmp_path_factory.mktemp("resumable") / "checkpoint-10"
    directory.mkdir()
    api.shard(models / "llama", directory / "pytorch_model_fsdp_0", mesh="dp_shard=2", prefix="model.")
    state = load_file(models / "llama" / "model.safetensors")
    moments = {f"optimizer.state.{name}.exp_avg": t for name, t in state.items()}
    (directory / "moments").mkdir()
    save_file(moments, directory / "moments" / "model.safetensors")
    api.shard(directory / "moments", directory / "optimizer_0", mesh="dp_shard=2")
    return directory


def test_match_of_accelerates_directory_finds_model_and_optimizer(resumable, models):
    result = check_checkpoint(str(resumable), spec(), model=str(models / "llama"), resumes=True)
    assert result.path.endswith("pytorch_model_fsdp_0")
    assert codes(result) == []


def test_match_without_optimizer_state_stops_a_resume(resumable, models, tmp_path):
    copy = tmp_path / "checkpoint-10"
    shutil.copytree(resumable / "pytorch_model_fsdp_0", copy / "pytorch_model_fsdp_0")
    result = check_checkpoint(str(copy), spec(), model=str(models / "llama"), resumes=True)
    assert codes(result) == ["checkpoint-no-optimizer"]
    assert the(result, "checkpoint-no-optimizer").what.startswith("resume resumes")
    assert codes(check_checkpoint(str(copy), spec(), model=str(models / "llama"))) == []


def test_match_of_a_checkpoint_that_cannot_be_read_is_a_finding(models, tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "__0_0.distcp").write_bytes(b"x")
    result = check_checkpoint(str(tmp_path / "killed"), spec(), model=str(models / "llama"))
    assert codes(result) == ["checkpoint-unreadable"]
    assert "killed before it finished" in the(result, "checkpoint-unreadable").what


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (("actor/optim_world_size_2_rank_0.pt", "actor/optim_world_size_2_rank_1.pt"), "rank files without a model"),
        (("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"), "Megatron's format before torch_dist"),
        (("weights.pkl",), "only pickled objects"),
    ],
)
def test_match_of_a_layout_that_only_its_trainer_reads_is_said_not_to_be_checked(models, tmp_path, files, word):
    for name in files:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(b"")
    result = check_checkpoint(str(tmp_path / "run"), spec("verl"), model=str(models / "llama"))
    assert result.findings == ()
    assert any(word in text for text in result.not_checked)
    assert result.view.facts is not None


def test_match_of_ranks_files_wants_as_many_ranks_and_finds_their_optimizer(models, tmp_path):
    state = load_file(models / "llama" / "model.safetensors")
    save_ranks(tmp_path / "actor", state, {"fsdp": 2}, lambda _: [dtensor.Shard(0)])
    torch.save({}, tmp_path / "actor" / "optim_world_size_2_rank_0.pt")
    result = check_checkpoint(str(tmp_path), spec("verl"), model=str(models / "llama"), resumes=True)
    assert codes(result) == []
    wide = spec("verl", mesh="dp_shard=4")
    result = check_checkpoint(str(tmp_path), wide, model=str(models / "llama"), resumes=True)
    assert codes(result) == ["checkpoint-mesh"]
    assert the(result, "checkpoint-mesh").hint.startswith("resume on 2 ranks")


def test_match_reports_what_verify_finds(models, tmp_path):
    api.shard(models / "llama", tmp_path / "run", mesh="dp_shard=2", prefix="model.")
    (tmp_path / "run" / "__1_0.distcp").unlink()
    result = check_checkpoint(str(tmp_path / "run"), spec(), model=str(models / "llama"))
    assert "missing-file" in codes(result)
    assert not result.verify.ok


def test_match_without_a_model_says_what_was_not_checked(models):
    result = check_checkpoint(str(models / "llama"), spec(), model=None)
    assert result.ok
    assert result.comparison is None
    assert any("names and shapes" in text for text in result.not_checked)


def test_match_with_a_config_that_describes_no_model_says_so(models, tmp_path):
    config = configured(tmp_path, models / "llama", architectures=["NoSuchModel"])
    result = check_checkpoint(str(models / "llama"), spec(), model=str(config))
    assert any("no model class NoSuchModel" in text for text in result.not_checked)
    assert result.view.facts.num_layers == 3  # the rules still know what the config says


@pytest.mark.full
def test_match_of_the_same_mesh_reads_one_file_per_rank(models, tmp_path):
    api.shard(models / "llama", tmp_path / "run", mesh="dp_shard=2,tp=2", tp_plan="auto", prefix="model.")
    result = check_checkpoint(str(tmp_path / "run"), spec(mesh="dp_shard=2,tp=2"), model=str(models / "llama"))
    assert codes(result) == []
    assert result.mesh == "dp_shard=2,tp=2"
    finding = the(result, "checkpoint-mesh")
    assert finding.severity == "info"
    assert finding.hint is None
    # What is whole on every rank (norms, in part) lies in the file of the rank that wrote it.
    assert max(one.num_files for one in result.reads) <= 2


def test_match_of_another_mesh_counts_bytes_and_proposes_the_reshard(models, tmp_path):
    api.shard(models / "llama", tmp_path / "run", mesh="dp_shard=2", prefix="model.")
    result = check_checkpoint(str(tmp_path / "run"), spec(mesh="dp_shard=8"), model=str(models / "llama"))
    finding = the(result, "checkpoint-mesh")
    assert f"ckpt reshard {tmp_path / 'run'} NEW --mesh dp_shard=8" in finding.hint
    with open_path(str(tmp_path / "run")) as opened:
        total = opened.checkpoint.total_bytes
    # Every chunk is half a tensor, and each of eight ranks needs a quarter of one.
    assert sum(one.needed_bytes for one in result.reads) == total
    assert sum(one.read_bytes for one in result.reads) == 4 * total


def test_match_of_full_files_says_who_reads_them(models):
    every = check_checkpoint(str(models / "llama"), spec(mesh="dp_shard=8"), model=str(models / "llama"))
    assert the(every, "checkpoint-mesh").what.startswith("each of 8 ranks reads all")
    first = check_checkpoint(
        str(models / "llama"), spec(mesh="dp_shard=8", cpu_ram_efficient_loading=True), model=str(models / "llama")
    )
    assert the(first, "checkpoint-mesh").what.startswith("the first rank reads all")


def test_reads_of_one_rank_are_what_dcp_reads_for_it(models, tmp_path):
    """Each item that torch's planner asks for is counted, and no other."""
    api.shard(models / "llama", tmp_path / "run", mesh="dp_shard=3")
    mesh = parse_mesh("dp_shard=2")
    with open_path(str(tmp_path / "run")) as opened:
        tensors = opened.checkpoint.tensors
    reads = count_reads(tensors, mesh, place_tensors(tensors, mesh, []).placements, whole_items=True)
    stored = dcp.FileSystemReader(tmp_path / "run").read_metadata().state_dict_metadata
    for one in reads:
        count = 0
        for entry in tensors:
            box = cut_tensor(entry.shape, mesh, {"dp_shard": Shard(0)}).local_box(one.rank)
            local = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            chunks = {chunk.offsets: chunk for chunk in stored[entry.fqn].chunks}
            items = create_read_items_for_chunk_list(entry.fqn, stored[entry.fqn], [local])
            count += sum(chunks[offset].sizes.numel() * 4 for offset in {item.storage_index.offset for item in items})
        assert one.read_bytes == count


def test_shard_mesh_folds_context_parallelism_into_the_cut():
    assert str(shard_mesh(parse_mesh("pp=2,dp_replicate=2,dp_shard=4,cp=2,tp=2"))) == "dp_replicate=2,dp_shard=8,tp=2"
    assert str(shard_mesh(parse_mesh("tp=4"))) == "tp=4"
    assert str(shard_mesh(parse_mesh("dp_replicate=8"))) == "dp_replicate=8"
    assert shard_mesh(None) is None


def test_look_at_model_counts_parameters_without_a_checkpoint(models):
    described = look_at_model(str(models / "tied")).comparison
    assert described.title == "LlamaForCausalLM"
    assert described.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    shapes = [t.shape for name, t in described.tensors.items() if t.kind == "parameter" and name != "lm_head.weight"]
    assert described.num_elems == sum(torch.Size(shape).numel() for shape in shapes)


def test_facts_come_back_from_the_other_process_as_they_were(models):
    facts = look_at_model(str(models / "moe")).facts
    assert wire.loads(ModelFacts, wire.dumps(facts)) == facts
    assert facts.where == read_facts(str(models / "moe")).where
