"""DeepSpeed's checkpoints against DeepSpeed itself: its live optimizer, and its own `zero_to_fp32`.

The samples are DeepSpeed's own; `deepspeed_ranks.py` says how they are made.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats.deepspeed_ranks import CASES, SAMPLES, TAG, UNIVERSAL, WANTED, Toy, digest, save
from formats.saved import Flat, flat, read
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError

FP32 = "deepspeed-fp32"
ZERO = [name for name, case in CASES.items() if case.stage]
MODEL = "mp_rank_00_model_states.pt"
PARTS = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(SAMPLES) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture
def sample(samples: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy that may be damaged."""
    return lambda case: shutil.copytree(samples / case, tmp_path / case)


def tensors(path: Path, kind: str | None = None) -> Flat:
    return read(path, kind=kind)


def digests(found: Flat) -> dict[str, dict[str, str]]:
    """As `deepspeed_ranks` has them: kind → name → digest."""
    kinds: dict[str, dict[str, str]] = {"fp32": {}}
    for name, (dtype, shape, content) in found.items():
        tensor = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
        if name.startswith("model."):
            kinds["fp32"][name.removeprefix("model.")] = digest(tensor)
        else:
            owner, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            kinds.setdefault(kind, {})[owner] = digest(tensor)
    return kinds


def check(path: Path, found: Flat) -> None:
    kinds = digests(found)
    wanted = json.loads((path / WANTED).read_text())
    assert {kind: kinds[kind] for kind in wanted} == wanted
    steps = {digest(torch.tensor(2.0))}
    assert set(kinds["step"].values()) == steps
    assert kinds["step"].keys() == kinds["exp_avg"].keys() == kinds["exp_avg_sq"].keys() < kinds["fp32"].keys()


@pytest.mark.parametrize("case", ZERO)
def test_fp32_weights_and_optimizer_are_those_of_deepspeed(samples: Path, case: str) -> None:
    path = samples / case
    found = tensors(path, FP32)
    check(path, found)
    assert tensors(path / TAG, FP32) == found
    result = api.verify(path, format=FP32)
    assert result.findings == ()
    assert not any("checksum" in text for text in result.not_checked)
    assert any("of one step" in text for text in result.not_checked)
    if CASES[case].stage == 3:
        assert tensors(path) == found
        return
    computed = tensors(path)
    assert {f"model.{name}" for name in computed} == {name for name in found if name.startswith("model.")}
    for name, (dtype, shape, content) in computed.items():
        master = found[f"model.{name}"]
        rounded = torch.frombuffer(bytearray(master[2]), dtype=master[0]).reshape(shape).to(dtype)
        assert flat({"": rounded})[""] == (dtype, shape, content), name


def test_default_is_what_the_trainer_computes_with_and_says_so(samples: Path, tmp_path: Path, capsys) -> None:
    path = samples / "zero2-bf16"
    assert main(["gather", str(path), str(tmp_path / "hf")]) == 0
    told = capsys.readouterr().err
    assert "reads the weights that the trainer computes with (BF16); --from deepspeed-fp32 reads the fp32" in told
    assert "left out, the fp32 weights and the optimizer's state, in files of 2 ranks (--from deepspeed-fp32)" in told
    assert "embed.weight = head.weight" in told
    module = torch.load(path / TAG / MODEL, weights_only=False) if "deepspeed" in sys.modules else None
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["up.weight"].dtype == torch.bfloat16
    assert flat(found).keys() == tensors(path).keys()
    assert flat(found) == tensors(path)
    assert module is None or flat(module["module"]) == tensors(path)
    assert main(["diff", str(path), str(tmp_path / "hf")]) == 0
    assert main(["shard", str(path), str(tmp_path / "dcp"), "--mesh", "dp_shard=2"]) == 0
    assert main(["diff", str(tmp_path / "dcp"), str(tmp_path / "hf")]) == 0


@pytest.mark.parametrize(("case", "options"), [("zero2-bf16", ["--from", FP32]), ("zero3-bf16", [])])
def test_reshard_gives_fsdp2_the_model_and_its_optimizer(samples: Path, tmp_path: Path, case: str, options) -> None:
    path = samples / case
    target = tmp_path / "dcp"
    assert main(["reshard", str(path), str(target), "--mesh", "dp_shard=3", *options]) == 0
    check(path, tensors(target))
    assert main(["verify", str(target)]) == 0
    assert main(["gather", str(path), str(tmp_path / "hf"), *options]) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = json.loads((path / WANTED).read_text())["fp32"]
    assert {name: digest(tensor) for name, tensor in found.items()} == wanted


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(("case", "options"), [("zero2-bf16", ["--from", FP32]), ("zero3-fp32", [])])
def test_torch_loads_the_optimizer_that_deepspeed_had(samples: Path, tmp_path: Path, case: str, options) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    assert main(["reshard", str(samples / case), str(tmp_path / "dcp"), "--mesh", "dp_shard=1", *options]) == 0
    model = Toy()
    model.frozen.weight.requires_grad_(not CASES[case].is_frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[::2]}, {"params": trained[1::2]}], lr=0.5)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        *((0.01, 0.0, (0.9, 0.999)), (0.01, 0.1, (0.9, 0.999)))
    ]
    kinds = digests(tensors(samples / case, FP32))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held = optimizer.state[parameter]
            assert digest(parameter.detach()) == kinds["fp32"][name]
            assert {key: digest(held[key]) for key in held} == {key: kinds[key][name] for key in held}


def test_stage_0_is_its_model_alone(samples: Path) -> None:
    assert len(tensors(samples / "zero0-bf16")) == 9
    with pytest.raises(UnreadableError, match="optimizer's files of ranks are missing: 0") as caught:
        tensors(samples / "zero0-bf16", FP32)
    assert "--from deepspeed reads" in str(caught.value.hint)


@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_form_is_the_same(samples: Path, tmp_path: Path, case: str) -> None:
    wanted = tensors(samples / case, FP32)
    path = samples / case / f"{TAG}_universal"
    found = tensors(path)
    own = {name: value for name, value in wanted.items() if not name.endswith(".step")}
    assert own.items() <= found.items()
    assert found.keys() - own.keys() <= wanted.keys()  # stage 3 keeps its step elsewhere
    above = tmp_path / "above"
    shutil.copytree(path, above / path.name)
    (above / "latest_universal").write_text(path.name)
    assert tensors(above) == found
    assert api.verify(above).findings == ()
    (above / path.name / "zero" / "up.bias" / "fp32.pt").unlink()
    with pytest.raises(UnreadableError, match="1 of 5 parameters have no fp32 weights here: up"):
        tensors(above)


def test_universal_form_without_its_model_says_what_it_lacks(sample, edit) -> None:
    path = sample("zero2-bf16") / f"{TAG}_universal"
    edit(path / MODEL, lambda content: content["param_shapes"][0].update({"up.bias": torch.Size([4])}))
    with pytest.raises(UnreadableError, match="no whole parameter 'up"):  # a part, as tensor parallelism has it
        tensors(path)
    edit(path / MODEL, lambda content: content.update(mp_world_size=2))
    with pytest.raises(UnreadableError, match="mp_world_size is 2"):
        tensors(path)
    (path / "mp_rank_01_model_states.pt").write_bytes((path / MODEL).read_bytes())
    edit(path / MODEL, lambda content: content["module"].update(half=torch.ones(2)))
    assert tensors(path)["model.count"][0] == torch.float32
    assert "model.half" not in tensors(path)
    assert any("buffers, and dtypes" in text for text in api.verify(path).not_checked)
    flat_one = sample("zero3-bf16") / f"{TAG}_universal"
    for rank in range(3):
        (flat_one / PARTS.format(rank)).unlink()
    with pytest.raises(UnreadableError, match="no whole parameter 'down"):
        tensors(flat_one)


def test_universal_form_of_a_round_robin_is_refused(sample, edit) -> None:
    """DeepSpeed 0.19.8 makes it from the addresses that `zero2-round-robin` shows to be wrong."""
    path = sample("zero2-bf16") / f"{TAG}_universal"
    edit(path / MODEL, lambda content: content["ds_config"]["zero_optimization"].update(round_robin_gradients=True))
    with pytest.raises(UnreadableError, match="picks the wrong elements") as caught:
        tensors(path)
    assert "made from" in str(caught.value.hint)


def test_part_of_tensor_parallelism_is_not_taken_for_the_model(sample, edit) -> None:
    path = sample("zero2-bf16")
    edit(path / TAG / MODEL, lambda content: content.update(mp_world_size=2))
    with pytest.raises(UnreadableError, match="mp_world_size is 2") as caught:
        tensors(path)
    assert "ds_to_universal.py" in str(caught.value.hint)


def test_latest_decides_and_nothing_else(sample) -> None:
    path = sample("zero2-bf16")
    (path / "latest").write_text(f"../{path.name}/{TAG}")
    with pytest.raises(UnreadableError, match=r"which is missing; found: global_step2, global_step2_universal"):
        tensors(path)
    (path / "latest").write_text(f"{TAG}\r\n")
    assert tensors(path)["up.bias"][0] == torch.bfloat16
    (path / "latest").unlink()
    assert "model.up.bias" in tensors(path)  # latest_universal
    (path / "latest_universal").unlink()
    with pytest.raises(UnreadableError, match="several DeepSpeed saves"):
        tensors(path)


def test_step_of_the_trainers_has_it_inside(sample, tmp_path: Path, capsys) -> None:
    step = sample("zero3-bf16").rename(tmp_path / "checkpoint-2")
    for name in ("config.json", "trainer_state.json", "zero_to_fp32.py"):
        (step / name).write_text("{}")
    (step / "latest").write_text("global_step2")
    for name in ("scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(3))):
        torch.save({}, step / name)
    (step / WANTED).unlink()
    assert main(["gather", str(step), str(tmp_path / "hf")]) == 0
    assert (
        "files beside the save: rng_state_0.pth, rng_state_1.pth, rng_state_2.pth, scheduler.pt, trainer_state.json"
        in capsys.readouterr().err
    )
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        *("ckpt_manifest.json", "config.json", "model.safetensors")
    ]
    assert api.verify(step).findings == ()
    with pytest.raises(UnreadableError, match="a directory of checkpoints"):
        tensors(tmp_path)
    with pytest.raises(UsageError, match="already sharded") as caught:
        api.shard(step, tmp_path / "no", mesh="dp_shard=2", format=FP32)
    assert str(caught.value.hint).endswith(f"--mesh dp_shard=2 --from {FP32}")


# Damage


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Callable[[dict], object]], None]:
    """Rewrite a file of DeepSpeed's without DeepSpeed."""
    for place, name in (
        ("runtime.zero.config", "ZeroStageEnum"),
        ("runtime.fp16.loss_scaler", "LossScaler"),
        ("utils.tensor_fragment", "fragment_address"),
    ):
        module = types.ModuleType(f"deepspeed.{place}")
        made = type(name, (int,) if name == "ZeroStageEnum" else (), {"__module__": module.__name__})
        if name == "ZeroStageEnum":
            made.__reduce__ = lambda self: (type(self), (int(self),))
        setattr(module, name, made)
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        for i in range(1, len(parts)):
            above = sys.modules[".".join(parts[:i])]
            above.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def change(path: Path, by: Callable[[dict], object]) -> None:
        content = torch.load(path, weights_only=False)
        by(content)
        torch.save(content, path)

    return change


class Claims:
    """A tensor of a size that its storage does not have."""

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.args = (tensor._typed_storage(), 0, shape, (1,) * len(shape), False, OrderedDict())

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.args


class Runs:
    """What would run if it were unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit(99)",)


def optimizer(content: dict) -> dict:
    return content["optimizer_state_dict"]


def masters(content: dict) -> list:
    state = optimizer(content)
    return state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))


def lean(content: dict, by: int, group: int = 0) -> None:
    masters(content)[group] = masters(content)[group][:-by].clone()


def shift(content: dict) -> None:
    address = next(iter(optimizer(content)["param_slice_mappings"][0].values()))
    address.start += 1


def forget(content: dict) -> None:
    state = optimizer(content)
    state["param_slice_mappings"] = []


def of_step(content: dict, step: float) -> None:
    state = optimizer(content)
    state = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    state["state"][0]["step"] = torch.tensor(step)


EDITS = {
    "shorter vector": ("zero2-bf16", OPTIMIZER.format(1), lambda c: lean(c, 20), "the ranks' vectors"),
    "shorter vector of stage 3": ("zero3-bf16", OPTIMIZER.format(2), lambda c: lean(c, 1), "its vectors have"),
    "shifted slices": ("zero2-bf16", OPTIMIZER.format(1), shift, "its stretch of group 0 does not match"),
    "slice of no number": (*("zero2-bf16", OPTIMIZER.format(0)),
        lambda c: optimizer(c)["param_slice_mappings"][0].update({"up.weight": 7}), "the positions of parameters"),
    "other world": (*("zero2-bf16", OPTIMIZER.format(0)), lambda c: optimizer(c).update(partition_count=[3, 3]),
        "on 3 ranks, but there are files of 2 ranks"),
    "two worlds": ("zero2-bf16", OPTIMIZER.format(0), lambda c: optimizer(c).update(partition_count=[2, 1]), "1, 2 r"),
    "no world": ("zero2-bf16", OPTIMIZER.format(0), lambda c: optimizer(c).update(partition_count={}), "-1 ranks"),
    "other stage": ("zero2-bf16", OPTIMIZER.format(1), lambda c: optimizer(c).update(zero_stage=1), "ZeRO stage 1"),
    "no stage": ("zero2-bf16", OPTIMIZER.format(1), lambda c: optimizer(c).update(zero_stage=[]), "no fp32 groups"),
    "one group less": ("zero2-bf16", OPTIMIZER.format(1), lambda c: masters(c).pop(), "1 groups, but the model's"),
    "another step": ("zero2-bf16", OPTIMIZER.format(1), lambda c: of_step(c, 3.0), "is 2.0 and 3.0"),
    "another step of stage 3": ("zero3-bf16", OPTIMIZER.format(1), lambda c: of_step(c, 9.0), "is 2.0 and 9.0"),
    "state of one rank less": (*("zero3-bf16", OPTIMIZER.format(1)),
        lambda c: optimizer(c)["optimizer_state_dict"]["state"][0].pop("exp_avg"),
        "rank 1 does not have its part of 'optimizer.state.embed.weight.exp_avg'"),
    "more than its storage": (*("zero2-bf16", OPTIMIZER.format(0)),
        lambda c: masters(c).__setitem__(0, Claims(masters(c)[0], (1 << 40,))),
        "the fp32 weights of group 0 are not one vector"),
    "half precision": (*("zero3-bf16", OPTIMIZER.format(1)), lambda c: masters(c).__setitem__(0, masters(c)[0].half()),
        "rank 1 has 'model.embed.weight' as F16, rank 0 as F32"),
    "negative padding": (*("zero2-bf16", OPTIMIZER.format(0)),
        lambda c: optimizer(c).update(param_alignment_paddings=[[-1, 1, 0], [0, 0]]), "the paddings of group 0"),
    "larger shape": (*("zero2-bf16", MODEL), lambda c: c["param_shapes"][0].update({"up.bias": torch.Size([10**6])}),
        "the parameters of group 0 have"),
    "impossible shape": (*("zero2-bf16", MODEL),
        lambda c: c["param_shapes"][0].update({"up.bias": torch.Size([1 << 40, 1 << 40])}),
        "parameter 1 has an invalid shape or name"),
    "a shape twice": (*("zero2-bf16", MODEL), lambda c: c["param_shapes"][1].update({"up.bias": torch.Size([9])}),
        "a parameter is in two groups"),
    "no shapes": ("zero2-bf16", MODEL, lambda c: c.update(param_shapes=None), "no param_shapes"),
    "model of another world": ("zero2-bf16", MODEL, lambda c: c.update(dp_world_size=[]), "dp_world_size is -1"),
    "tensor parallel": ("zero2-bf16", MODEL, lambda c: c.update(mp_world_size=2), "mp_world_size is 2"),
    "model of another step": ("zero3-bf16", PARTS.format(1), lambda c: c.update(global_steps=5), "global_steps is 5"),
    "model with another order": (*("zero3-bf16", PARTS.format(2)),
        lambda c: c["param_shapes"][0].move_to_end("up.weight"), "parameters differ from those of rank 0"),
    "frozen part less": (*("zero3-bf16", PARTS.format(2)), lambda c: c["frozen_param_fragments"].clear(),
        "no part of the frozen parameter 'frozen.weight'"),
    "shorter frozen part": (*("zero3-bf16", PARTS.format(1)),
        lambda c: c["frozen_param_fragments"].update({"frozen.weight": torch.ones(3, dtype=torch.bfloat16)}),
        "its vectors have 3 elements, but its parts of the parameters have 27"),
    "parameter of nobody": (*("zero3-bf16", PARTS.format(0)), lambda c: c["module"].update({"lost": torch.ones(0)}),
        "'lost' is in the file of no rank"),
}  # fmt: skip


@pytest.mark.parametrize("damage", EDITS)
def test_what_does_not_fit_is_refused(sample, edit, damage: str, capsys) -> None:
    case, name, change, what = EDITS[damage]
    path = sample(case)
    edit(path / TAG / name, change)
    with pytest.raises(UnreadableError, match=what) as caught:
        tensors(path, FP32)
    assert name in str(caught.value.where) or caught.value.where or caught.value.hint
    assert main(["verify", str(path), "--from", FP32]) == 4
    assert "Traceback" not in capsys.readouterr().err


def test_addresses_are_not_needed(sample, edit) -> None:
    path = sample("zero2-bf16")
    for rank in range(2):
        edit(path / TAG / OPTIMIZER.format(rank), forget)
    check(path, tensors(path, FP32))
    edit(path / TAG / OPTIMIZER.format(1), lambda content: lean(content, 1, 1))
    with pytest.raises(UnreadableError, match="the ranks have 44 elements of 'down"):
        tensors(path, FP32)


def test_step_of_older_releases_is_that_of_its_group(sample, edit) -> None:
    def old(content: dict) -> None:
        base = optimizer(content)["base_optimizer_state"]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = 2

    path = sample("zero2-bf16")
    for rank in range(2):
        edit(path / TAG / OPTIMIZER.format(rank), old)
    check(path, tensors(path, FP32))


def test_files_of_ranks_that_lack_or_lie_in_other_places_are_refused(sample, tmp_path: Path) -> None:
    path = sample("zero1-bf16")
    first, second = (path / TAG / OPTIMIZER.format(rank) for rank in range(2))
    shutil.copy(first, tmp_path / "kept")
    shutil.copy(second, first)
    with pytest.raises(UnreadableError, match="its stretch of group 0 does not match"):
        tensors(path, FP32)
    shutil.copy(tmp_path / "kept", second)
    with pytest.raises(UnreadableError, match="its stretch of group 0 does not match"):
        tensors(path, FP32)
    first.unlink()
    with pytest.raises(UnreadableError, match="the optimizer's files of ranks are missing: 0"):
        tensors(path, FP32)
    assert len(tensors(path)) == 9  # the model is whole without them
    (path / TAG / OPTIMIZER.format(2)).write_bytes(second.read_bytes())
    with pytest.raises(UnreadableError, match="are missing: 0"):
        tensors(path, FP32)


def test_missing_ranks_of_stage_3_are_named(sample) -> None:
    path = sample("zero3-bf16")
    (path / TAG / OPTIMIZER.format(2)).unlink()
    with pytest.raises(UnreadableError, match="the optimizer's files of ranks are missing: 2"):
        tensors(path)
    (path / TAG / PARTS.format(2)).unlink()
    with pytest.raises(UnreadableError, match="on 3 ranks, but there are files of 2 ranks"):
        tensors(path)


def test_nothing_is_run_and_other_state_is_said(sample, edit, capsys) -> None:
    path = sample("zero2-bf16")
    edit(path / TAG / MODEL, lambda content: content.update(mine=Runs()))
    edit(
        path / TAG / OPTIMIZER.format(0),
        lambda content: optimizer(content)["base_optimizer_state"]["state"][0].update(odd=Runs()),
    )
    assert main(["verify", str(path)]) == 3
    said = capsys.readouterr()
    assert "mine" in said.err
    assert "dangerous-pickle" in said.out
    assert main(["verify", str(path), "--from", FP32]) == 3
    assert "other state of the optimizer: 0.odd" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("case", ["zero2-bf16", "zero3-fp32"])
def test_installed_deepspeed_writes_what_is_read(tmp_path: Path, case: str) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (formats/deepspeed_ranks.py says how)")
    path = save(tmp_path, case)
    check(path, tensors(path, FP32))
