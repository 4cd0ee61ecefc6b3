"""Models that have nothing wrong: every phase runs, every number is the reference's, nothing is found."""

from __future__ import annotations

import pytest

from ckpt_tools import api
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.smoke.report import PHASES

pytestmark = pytest.mark.full(but=["test_smoke_of_a_healthy_model_finds_nothing[llama-dp_shard=2]"])

RUN = [name for name in PHASES if name != "source"]  # which only the program itself does
LOSS_FP32, GRADIENT_FP32 = 1e-6, 1e-5


def check(report, *, bitwise=True, findings=()):
    """Nothing else is found, every phase ran, and every reload gave the very same loss."""
    assert tuple(finding.code for finding in report.findings) == findings
    assert report.ok is not any(finding.severity == "error" for finding in report.findings)
    assert [phase.name for phase in report.phases if phase.ok] == RUN
    assert len(report.losses) == len(report.reference_losses)
    assert report.reload_same_world.bitwise
    assert report.reload_other_world.ok
    assert report.reload_other_world.bitwise or not bitwise
    assert report.reload_other_world.mesh != report.mesh
    assert [memory.rank for memory in report.memory] == list(range(report.world_size))


def check_fp32(report, *, findings=()):
    check(report, findings=findings)
    assert report.tolerances == {"loss": LOSS_FP32, "gradient": GRADIENT_FP32}
    for loss, expected in zip(report.losses, report.reference_losses, strict=True):
        assert abs(loss - expected) <= LOSS_FP32 * max(1, abs(expected))
    assert report.max_grad_error <= GRADIENT_FP32
    assert max(report.grad_errors.values()) == report.max_grad_error
    assert all(phase.memory_bytes > 1 << 26 for phase in report.phases[2:] if phase.ok)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("llama", "dp_shard=2"),
        ("llama", "dp_shard=2,tp=2"),
        ("bert", "dp_replicate=2,dp_shard=2"),
        ("t5", "dp_shard=2"),
        ("moe", "dp_shard=2"),
        ("classifier", "dp_shard=2"),
        ("vit", "dp_shard=2"),
        ("llava", "dp_shard=2"),
    ],
)
def test_smoke_of_a_healthy_model_finds_nothing(farm, models, kind, mesh):
    report = farm.smoke(source=str(models / kind), mesh=mesh, steps=2)
    check_fp32(report)
    # LLaVA takes the last but one layer's output of its vision tower: the layer behind it trains nothing.
    assert any("no gradient" in note for note in report.notes) == (kind == "llava")
    assert report.mesh == mesh
    assert len(report.losses) == 2
    assert report.losses[1] < report.losses[0]


@pytest.mark.parametrize(
    ("kind", "written", "mesh", "names"),
    [
        ("llama", "dp_shard=4,tp=2", "dp_shard=2", "auto"),
        ("bert", "dp_shard=3", "dp_shard=2", "auto"),
        ("moe", "dp_shard=2", "dp_replicate=2", "auto"),
        ("moe", "dp_shard=2", "dp_replicate=2", "hub"),  # fused experts
    ],
)
def test_smoke_of_a_sharded_checkpoint_fails_only_where_dcp_load_would(
    farm, models, tmp_path, kind, written, mesh, names
):
    dcp = tmp_path / "dcp"
    api.shard(models / kind, dcp, mesh=written, tp_plan="auto" if "tp" in written else None, names=names)
    report = farm.smoke(source=str(dcp), mesh=mesh, steps=1)
    is_live = names == "auto"
    check_fp32(report, findings=() if is_live else ("live-names",))
    farm.call("smoke.makers:load_by_dcp", str(models / kind), str(dcp), is_live)
    assert ("names as in the file" in said_of_load(report)) == is_live
    for finding in report.findings:  # and what it says to do helps
        assert f"`ckpt reshard {dcp} DST --mesh {mesh} --names live`" in finding.hint
        api.reshard(dcp, tmp_path / "live", mesh=mesh, names="live")
        farm.call("smoke.makers:load_by_dcp", str(models / kind), str(tmp_path / "live"), True)


def said_of_load(report):
    return next(phase.what for phase in report.phases if phase.name == "load")


def test_smoke_of_files_of_the_hub_says_by_which_map_their_names_are_found(farm, models):
    report = farm.smoke(source=str(models / "moe"), steps=1)
    check_fp32(report)
    assert "names of the live Qwen3MoeForCausalLM of transformers 5." in said_of_load(report)
    assert "6 of 36 tensors are renamed, joined or split" in said_of_load(report)


def test_smoke_of_torchtitans_names_fails_and_says_the_way_to_live_ones(farm, models, tmp_path):
    api.shard(models / "llama", tmp_path / "dcp", mesh="dp_shard=2", names="torchtitan")
    report = farm.smoke(source=str(tmp_path / "dcp"), steps=1)
    assert not report.ok
    (finding,) = report.findings
    assert finding.code == "live-names"
    assert finding.what.startswith("the names are torchtitan's or Meta's own: 28 of 30 tensors of the live model")
    assert f"`ckpt reshard {tmp_path / 'dcp'} DST --mesh dp_shard=2 --names live`" in finding.hint
    api.reshard(tmp_path / "dcp", tmp_path / "live", mesh="dp_shard=2", names="live")
    farm.call("smoke.makers:load_by_dcp", str(models / "llama"), str(tmp_path / "live"), True)


def test_smoke_of_a_checkpoint_without_config_takes_the_model_from_elsewhere(farm, models, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes((models / "llama" / "model.safetensors").read_bytes())
    report = farm.smoke(source=str(tmp_path / "weights"), model=str(models / "llama"), steps=1)
    check_fp32(report)


@pytest.mark.parametrize(
    ("strategy", "named", "mesh"),
    [
        ("SHARD_GRAD_OP", "shard_grad_op", "dp_shard=2"),
        ("hybrid_shard", "hybrid_shard", "dp_replicate=2,dp_shard=2"),
        ("no_shard", "no_shard", "dp_replicate=2"),
    ],
)
def test_smoke_of_every_strategy_finds_nothing(farm, models, strategy, named, mesh):
    nproc = 4 if named == "hybrid_shard" else None
    report = farm.smoke(source=str(models / "llama"), strategy=strategy, nproc=nproc, steps=2)
    check_fp32(report)
    assert (report.strategy, report.mesh) == (named, mesh)
    whole = sum(memory.params for memory in report.memory)
    assert report.memory[0].params == whole // report.world_size


def test_smoke_in_bfloat16_agrees_within_its_rounding(farm, models):
    report = farm.smoke(source=str(models / "llama"), param_dtype="bf16", reduce_dtype="f32")
    check(report)
    # bfloat16 has 8 significant bits: one rounding is up to 2^-9 = 0.2 %, and a loss is the sum of many.
    assert report.tolerances == {"loss": 1e-2, "gradient": 5e-2}
    # The reference rounds at the same places, so in the first step there is next to no difference without tp.
    assert abs(report.losses[0] - report.reference_losses[0]) < 1e-4
    assert report.max_grad_error < 2e-2


def test_smoke_of_bfloat16_weights_without_a_loss_keeps_their_dtype(farm, models):
    report = farm.smoke(source=str(models / "bare"), steps=1)
    check(report)
    assert report.tolerances["gradient"] == 5e-2
    assert any("returns no loss" in note for note in report.notes)
    elements = (models / "bare" / "model.safetensors").stat().st_size // 2
    assert sum(memory.params for memory in report.memory) == pytest.approx(2 * elements, rel=0.2)


def test_smoke_of_adapters_trains_only_them(farm, models):
    report = farm.smoke(source=str(models / "llama"), lora=True, steps=2)
    check_fp32(report)
    assert report.memory[0].grads < report.memory[0].params / 3


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dora", "lokr", "oft"])
def test_smoke_with_other_adapters_on_chosen_layers_finds_nothing(models, farm, kind):
    pytest.importorskip("peft", reason="needs the extra hf")
    every = farm.smoke(source=str(models / "llama"), lora=True, adapter=kind, steps=1)
    some = farm.smoke(source=str(models / "llama"), lora=True, adapter=kind, target=["**.q_proj"], steps=1)
    assert every.ok
    assert some.ok
    assert 0 < len(some.grad_errors) < len(every.grad_errors)
    assert all(".q_proj." in name for name in some.grad_errors)
    with pytest.raises(UsageError, match="--target ghost matches no linear layer"):
        farm.smoke(source=str(models / "llama"), lora=True, adapter=kind, target=["**.q_proj", "ghost"], steps=1)


def test_smoke_of_quantised_weights_with_adapters_reloads_them_bit_for_bit(farm, models):
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    report = farm.smoke(source=str(models / "llama"), lora=True, quantize="nf4", steps=1)
    check_fp32(report)
    plain = (models / "llama" / "model.safetensors").stat().st_size
    assert sum(memory.params for memory in report.memory) < plain


def test_smoke_of_a_model_that_is_too_large_tries_fewer_layers(farm, models):
    whole = (models / "llama" / "model.safetensors").stat().st_size
    report = farm.smoke(source=str(models / "llama"), memory=12 * whole, steps=1)
    check_fp32(report)
    assert "cut to 2 of 3 layers" in report.model
    assert any("2 of its 3 layers" in note for note in report.notes)
    assert sum(memory.params for memory in report.memory) < 0.9 * whole


def test_smoke_of_a_model_whose_first_layer_is_too_large_compares_no_losses(farm, models):
    report = farm.smoke(source=str(models / "llama"), memory=1 << 10, steps=1)
    assert report.ok
    assert report.reference_losses == ()
    assert report.max_grad_error is None
    assert [phase.name for phase in report.phases if phase.ok is None] == ["source", "gradients"]
    assert any("losses are not compared" in note for note in report.notes)


def test_smoke_without_a_checkpoint_takes_random_weights(farm):
    report = farm.smoke(nproc=3, steps=1)
    check_fp32(report)
    assert report.mesh == "dp_shard=3"
    assert any("random" in note for note in report.notes)


def test_smoke_of_a_factory_that_says_how_to_cut_finds_nothing(farm):
    report = farm.smoke(factory="smoke.factories:Planned", mesh="dp_shard=1,tp=2", steps=1)
    check(report, bitwise=False)  # without tp, sums are added up in another order
    assert report.max_grad_error <= GRADIENT_FP32
    assert report.reload_other_world.mesh == "dp_shard=1,tp=1"


def test_smoke_on_one_rank_reloads_on_two(farm):
    report = farm.smoke(factory="smoke.factories:healthy", nproc=1, steps=1)
    check_fp32(report)
    assert report.reload_other_world.mesh == "dp_shard=2"


def test_smoke_of_a_model_that_prints_keeps_its_output_away(farm, capfd):
    report = farm.smoke(factory="smoke.factories:WritesStdout", steps=1)
    check_fp32(report)
    assert "hello" not in capfd.readouterr().out
