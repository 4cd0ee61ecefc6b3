"""One thing is wrong per test: the right finding, in the right phase, and no process left."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.errors import UnreadableError, UsageError

pytestmark = pytest.mark.full  # quick are tests/fsdp2/test_diagnoses.py and test_names.py


def codes(report):
    return [finding.code for finding in report.findings if finding.severity == "error"]


def failed(report):
    return [phase.name for phase in report.phases if phase.ok is False]


def damaged(models, tmp_path, change, kind="llama"):
    """A copy of a model whose state dict went through `change`."""
    path = tmp_path / "model"
    shutil.copytree(models / kind, path)
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize(
    ("factory", "code", "phase", "where", "what"),
    [
        pytest.param(
            "CustomMethod", "custom-method", "forward", "layers.0", "layers.0.run(...) was called", id="CustomMethod"
        ),
        ("DotForward", "dot-forward", "forward", "layers.0", "layers.0.forward(...) was called"),
        ("DoubleWrap", "double-wrap", "shard", "layers.0.run", "forward → run"),
        ("KeywordModel", "opaque-output", "backward", "(root)", "Output"),
        ("NotFinite", "not-finite", "loss", "(root)", "the first module whose output is not finite"),
        ("Overflows", "not-finite", "loss", "layers.1.up", "Linear layers.1.up is the first module whose output"),
        ("DividesByNothing", "not-finite", "loss", "(root)", "the input of Layer layers.0 is not finite"),
        ("SumsOverRanks", "sum-over-ranks", "loss", "the gradients", "2 times those of one rank"),
        ("Silent", "no-gradient", "backward", "layers.*.norm.weight", "12 of 15 trainable parameters"),
        ("Raises", "forward-failed", "forward", "factories.py", "ZeroDivisionError: the model says no"),
        ("Nothing", "forward-failed", "forward", "phase forward", "returned no loss"),
    ],
)
def test_broken_model_gets_its_diagnosis(farm, factory, code, phase, where, what):
    report = farm.smoke(factory=f"smoke.factories:{factory}")
    assert codes(report) == [code]
    assert failed(report) == [phase]
    assert not report.ok
    finding = report.findings[0]
    assert where in finding.where
    assert what in finding.what
    later = [result for result in report.phases if result.ok is None and result.name != "source"]
    assert {result.what for result in later} == {"not reached"}


def test_model_with_a_generator_of_its_own_is_not_compared_and_told_so(farm):
    report = farm.smoke(factory="smoke.factories:OwnGenerator", steps=2)
    assert not report.findings
    assert report.reference_losses == ()
    assert report.max_grad_error is None
    assert [phase.name for phase in report.phases if phase.ok is None] == ["source", "gradients"]
    assert sum("not compared" in note for note in report.notes) == 3
    assert any("uses its own random generator" in note for note in report.notes)
    assert report.reload_same_world is None


def test_two_scalars_that_may_be_the_loss_are_asked_about(farm):
    with pytest.raises(UsageError, match="returns scalars at 0, 1, of which 2 have a gradient") as caught:
        farm.smoke(factory="smoke.factories:TwoScalars")
    assert "--loss NAME" in caught.value.hint
    with pytest.raises(UsageError, match="what forward returns at '2' cannot be the loss: it is a NoneType"):
        farm.smoke(factory="smoke.factories:TwoScalars", loss="2")
    by_name = farm.smoke(factory="smoke.factories:TwoScalars", loss="0", steps=1)
    by_model = farm.smoke(factory="smoke.factories:Penalised", steps=1)
    assert by_name.ok
    assert by_model.ok
    assert by_model.losses[0] == pytest.approx(2 * by_name.losses[0])


def test_meta_alone_refuses_what_it_cannot_build(farm):
    with pytest.raises(UsageError, match=r"on the meta device it raises RuntimeError: Tensor.item\(\)") as caught:
        farm.smoke(factory="smoke.factories:ReadsNumbers", build="meta")
    assert "--build cpu" in caught.value.hint
    assert farm.smoke(factory="smoke.factories:healthy", build="cpu", steps=1).notes[1].endswith(": --build cpu")


def test_weights_that_a_checkpoint_has_as_zeros_or_one_number_are_named(farm, models, tmp_path):
    def change(state):
        state["model.layers.1.self_attn.q_proj.weight"].zero_()
        state["model.layers.2.mlp.down_proj.weight"].fill_(0.5)

    report = farm.smoke(source=damaged(models, tmp_path, change), steps=1)
    found = {(finding.code, finding.severity, finding.where, finding.what) for finding in report.findings}
    size = 32 * 32
    assert found == {
        ("all-zero", "warning", "model.layers.1.self_attn.q_proj.weight", f"all {size} elements are 0"),
        ("constant", "warning", "model.layers.2.mlp.down_proj.weight", f"all {2 * size} elements are 0.5"),
    }
    assert report.ok


def test_weight_that_is_not_finite_is_named_before_anything_runs(farm, models, tmp_path):
    def change(state):
        state["model.layers.1.mlp.down_proj.weight"][-1, 3] = float("nan")

    report = farm.smoke(source=damaged(models, tmp_path, change))
    (finding,) = report.findings
    assert (finding.code, failed(report)) == ("not-finite", ["load"])
    shape = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].shape
    assert finding.where == "model.layers.1.mlp.down_proj.weight"
    assert f"1 NaN of {shape.numel() // 2} elements, the first at [{shape[0] - 1}, 3] on rank 1" in finding.what


def test_loss_that_breaks_in_a_later_step_is_found(farm):
    report = farm.smoke(factory="smoke.factories:BreaksLater")
    assert codes(report) == ["not-finite"]
    assert failed(report) == ["step"]
    assert "the loss of step 2 is inf" in report.findings[0].what


def test_state_outside_of_the_state_dict_is_found_when_it_counts(farm):
    report = farm.smoke(factory="smoke.factories:Remembers")
    assert set(codes(report)) == {"wrong-loss"}
    assert failed(report) == ["step"]
    report = farm.smoke(factory="smoke.factories:Forgets", steps=1)
    assert codes(report) == ["wrong-reload"]
    assert failed(report) == ["reload-same-world"]
    assert not report.reload_same_world.ok


def test_gradient_that_nobody_averages_is_found(farm):
    report = farm.smoke(factory="smoke.factories:Detached")
    assert "wrong-gradient" in codes(report)
    assert failed(report) == ["gradients"]


def test_rank_that_hangs_is_named_with_its_place(farm):
    report = farm.smoke(factory="smoke.factories:Hangs", timeout_s=8.0)
    assert codes(report) == ["hang"]
    assert failed(report) == ["forward"]
    finding = report.findings[0]
    assert finding.where == "rank 1"
    assert "rank 1 is in phase forward in wait_for_ever (factories.py:" in finding.what
    assert "rank 0 is waiting in phase forward for the other ranks in" in finding.what
    assert "wait_for_ever" in report.stacks[1]


@pytest.mark.parametrize(
    ("factory", "where", "what"),
    [
        ("Dies", "rank 1", "SIGKILL"),
        ("Aborts", "rank 1", "SIGABRT"),
        ("LeavesQuietly", "rank 1", "exit status 0"),
        ("DiesFirst", "rank 0", "status 7"),
    ],
)
def test_rank_that_ends_is_the_one_cause(farm, factory, where, what):
    report = farm.smoke(factory=f"smoke.factories:{factory}")
    assert codes(report) == ["rank-died"]
    assert failed(report) == ["forward"]
    assert report.findings[0].where == f"{where}, phase forward"
    assert what in report.findings[0].what


def test_rank_that_skips_a_layer_is_found_by_comparing_what_ranks_did(farm):
    report = farm.smoke(factory="smoke.factories:Skips", timeout_s=8.0)
    assert codes(report) == ["rank-skip"]
    assert report.findings[0].where == "layers.1"


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "code", "phases", "said"),
    [
        (lambda state: state.pop(UP), "missing-tensor", ("load",), UP),
        (lambda state: state.update({"model.extra.weight": torch.ones(2)}), "unexpected-tensor", ("load",), "extra"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(7)}),
            "load-failed",
            ("load",),
            "model.norm.weight: [7] in the checkpoint, [32] in the model",
        ),
        (lambda state: state.update({NORM: state[NORM].bfloat16()}), "dtype-mix", ("states", "forward"), ""),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensor_that_does_not_fit_is_found(farm, models, tmp_path, change, code, phases, said):
    report = farm.smoke(source=damaged(models, tmp_path, change))
    assert codes(report) == [code] * len(report.findings)
    assert len(report.findings) == 1 or code == "dtype-mix"
    assert [phase in phases for phase in failed(report)] == [True]
    assert said in f"{report.findings[0].where}: {report.findings[0].what}"


REFUSED = [
    ({"mesh": "dp_shard=2,tp=3"}, "divisible by tp=3"),
    ({"mesh": "dp_shard=-1,tp=2", "nproc": 3}, "a world of 3 ranks is not a multiple of 2"),
    ({"strategy": "sideways"}, "unknown strategy"),
    ({"strategy": "hybrid_shard", "mesh": "dp_shard=2"}, "hybrid_shard needs the axes dp_replicate and dp_shard"),
    ({"lora": True, "mesh": "dp_shard=1,tp=2"}, "matches none of its modules"),
]


@pytest.mark.parametrize(("options", "what"), REFUSED, ids=lambda value: str(value)[:30])
def test_option_that_cannot_be_is_refused(farm, models, options, what):
    with pytest.raises(UsageError) as caught:
        farm.smoke(source=str(models / "llama"), **options)
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"architectures": ["os.system"]}, "has no model class os.system"),
        ({"architectures": ["pipeline"]}, "has no model class pipeline"),
        ({"architectures": None}, "names no architecture"),
        ({"num_attention_heads": "four"}, "does not describe a LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
    ],
    ids=["no-class", "function", "none", "invalid", "quantised"],
)
def test_config_that_names_no_model_is_refused(farm, models, tmp_path, change, what):
    config = json.loads((models / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError) as caught:
        farm.smoke(source=str(models / "llama"), model=str(tmp_path))
    assert what in caught.value.what
    assert str(tmp_path) in caught.value.where


def test_weights_that_nothing_describes_are_refused(farm, models, tmp_path):
    shutil.copy(models / "llama" / "model.safetensors", tmp_path)
    with pytest.raises(UsageError, match="the model is not known"):
        farm.smoke(source=str(tmp_path / "model.safetensors"))


def test_config_that_is_no_json_is_unreadable(farm, models, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableError, match="not valid JSON"):
        farm.smoke(source=str(models / "llama"), model=str(tmp_path))


@pytest.mark.parametrize(
    ("factory", "what"),
    [
        ("smoke.factories:not_a_module", "returned a int"),
        ("smoke.factories:absent", "has no callable 'absent'"),
        ("smoke.nowhere:absent", "no module named 'smoke.nowhere'"),
    ],
)
def test_factory_that_makes_no_model_is_refused(farm, factory, what):
    with pytest.raises(UsageError) as caught:
        farm.smoke(factory=factory)
    assert what in caught.value.what
