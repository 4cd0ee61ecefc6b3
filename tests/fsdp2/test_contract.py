"""The loader's contract: every parameter and buffer is loaded, computed by its own module, or reported.

What `from_pretrained` makes of the same files is the oracle, bit for bit; memory is poisoned before the load.
"""

from __future__ import annotations

import json
import logging
import re
import shutil

import pytest
import torch
import transformers
from fsdp2.ranks import run_ranks
from names import zoo
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.fsdp2 import load_checkpoint, shard_model
from ckpt_tools.models.config import read_config

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("MarianMTModel", "DeepseekV3ForCausalLM", "T5ForConditionalGeneration")
_SLICES, _OF = 8, 12
KNOWN = dict.fromkeys(("ChineseCLIPModel", "ChineseCLIPTextModel"), "from_pretrained clears a row that it has loaded")


def poisoned(model: nn.Module) -> nn.Module:
    """Give a model on meta memory full of garbage."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, each name of a shared one."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """The names whose bytes differ."""

    def content(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    found = tensors(model)
    return [name for name, one in tensors(expected).items() if content(one) != content(found[name])]


def drop(directory, is_out) -> list[str]:
    """Leave tensors out of a file."""
    file = directory / "model.safetensors"
    state = load_file(file)
    gone = [name for name in state if is_out(name)]
    save_file({name: one for name, one in state.items() if name not in gone}, file, metadata={"format": "pt"})
    return gone


def walk(name: str, directory) -> str:
    """Return "" or what is wrong; "small" for a model that does not build small."""
    saved = zoo.save(name, directory)
    if saved is None:
        return "small"
    patterns = saved._keys_to_ignore_on_load_missing or ()
    if (directory / "model.safetensors").exists():
        drop(directory, lambda key: any(re.search(pattern, key) for pattern in patterns))
    torch.manual_seed(3)
    try:
        expected, info = type(saved).from_pretrained(directory, output_loading_info=True)
        model = poisoned(zoo.build(name, saved.config.to_dict(), "meta"))
    except AttributeError:  # JevForDecision takes neither its own config nor output_loading_info
        return "small"
    torch.manual_seed(3)
    try:
        load_checkpoint(model, directory)
    except CkptError as error:
        return f"refused: {error}"
    wrong = differing(model, expected)
    return f"differs: {wrong[:3]}; missing there: {sorted(info['missing_keys'])[:3]}" if wrong else ""


@pytest.mark.parametrize("name", QUICK)
def test_poisoned_memory_becomes_what_from_pretrained_makes(name, tmp_path) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    assert walk(name, tmp_path) == ""


@pytest.mark.full
@pytest.mark.parametrize("at", range(_SLICES))
def test_every_class_that_builds_small_becomes_what_from_pretrained_makes(at, tmp_path, request) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    wrong, tried = {}, 0
    for name in zoo.all_names()[at :: _SLICES * (1 if request.config.getoption("--zoo") else _OF)]:
        what = walk(name, tmp_path / name)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        tried += what != "small"
        if what not in ("", "small") and name not in KNOWN:
            wrong[name] = what
    print(f"tried {tried} classes")  # pytest -s shows it
    assert wrong == {}
    assert tried


def sharded(rank, world_size, path):
    """Marian on FSDP2, in poisoned memory; the whole tensors."""
    saved = transformers.MarianMTModel.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.MarianMTModel(saved.config)
    shard_model(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",)))
    report = load_checkpoint(poisoned(model), path)
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors(model).items()}
    same = [name for name, one in tensors(saved).items() if not torch.equal(one, whole[name])]
    return report.missing, report.computed, same, model.lm_head.weight is model.model.shared.weight


@pytest.mark.full
def test_sharded_parameters_that_files_lack_are_computed_whole_and_cut(tmp_path) -> None:
    zoo.save("MarianMTModel", tmp_path)
    positions = tuple(f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder"))
    drop(tmp_path, positions.__contains__)
    for result in run_ranks(2, sharded, tmp_path):
        assert result == ((), positions, [], True)


class Careless(transformers.LlamaForCausalLM):
    """Initialises as models of one's own do: whatever it meets, in place."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for parameter in module.parameters():
            parameter.data.fill_(7.0)


def test_initialiser_that_spares_nothing_touches_nothing_that_was_loaded(tmp_path) -> None:
    saved = zoo.save("LlamaForCausalLM", tmp_path)
    model = Careless(saved.config)
    load_checkpoint(model, tmp_path)
    load_checkpoint(model, tmp_path, names=lambda name: name if "lm_head" in name else None, strict=False)
    assert differing(model, saved) == []


def test_computing_leaves_the_generators_of_other_devices_alone(tmp_path, monkeypatch) -> None:
    kind, config = transformers.BertModel, transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
    kind(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = kind(config)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("seeds every GPU"))
    assert load_checkpoint(model, tmp_path).buffers
    assert torch.equal(torch.get_rng_state(), before)


def test_pooler_that_the_model_has_not_is_left_out_and_said(tmp_path) -> None:
    saved = zoo.save("RobertaForMaskedLM", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"roberta.pooler.dense.weight": torch.ones(2, 2)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    model = zoo.build("RobertaForMaskedLM", saved.config.to_dict(), "meta")
    report = load_checkpoint(model, tmp_path)
    assert report.ignored == tuple(extra)
    assert "roberta.pooler.dense.weight" in report.notes[0]
    assert differing(model, type(saved).from_pretrained(tmp_path)) == []
    save_file(load_file(file) | {"roberta.other.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(UnreadableError, match=r"1 unexpected: roberta\.other\.weight"):
        load_checkpoint(zoo.build("RobertaForMaskedLM", saved.config.to_dict(), "meta"), tmp_path)


def test_head_of_another_class_is_left_out_and_the_models_own_starts_anew(tmp_path) -> None:
    saved = zoo.save("BertForMaskedLM", tmp_path)
    model = zoo.build("BertForSequenceClassification", saved.config.to_dict(), "meta")
    torch.manual_seed(4)
    report = load_checkpoint(model, tmp_path)
    assert set(report.computed) == {
        *(f"classifier.{part}" for part in ("weight", "bias")),
        *(f"bert.pooler.dense.{part}" for part in ("weight", "bias")),
    }
    assert {name.partition(".")[0] for name in report.ignored} == {"cls"}
    torch.manual_seed(4)
    assert differing(model, transformers.BertForSequenceClassification.from_pretrained(tmp_path)) == []


def test_tied_names_with_the_same_bytes_are_one_though_they_hold_nan(tmp_path) -> None:
    saved = zoo.save("GPT2LMHeadModel", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["transformer.wte.weight"][0, 0] = float("nan")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file(state, file, metadata={"format": "pt"})
    model = zoo.build("GPT2LMHeadModel", saved.config.to_dict(), "meta")
    load_checkpoint(model, tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    state["lm_head.weight"][1, 1] += 1
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="two different values"):
        load_checkpoint(zoo.build("GPT2LMHeadModel", saved.config.to_dict(), "meta"), tmp_path)


@pytest.mark.parametrize("said", [True, None])
def test_tied_by_config_and_two_in_the_files_is_said_with_the_line_that_mends_it(said, tmp_path, capsys) -> None:
    zoo.save("GPT2LMHeadModel", tmp_path / "hub")
    file, config = tmp_path / "hub" / "model.safetensors", tmp_path / "hub" / "config.json"
    state = load_file(file)
    state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, file, metadata={"format": "pt"})
    values = json.loads(config.read_text()) | {"tie_word_embeddings": said}
    config.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    hub, dcp, out = (str(tmp_path / name) for name in ("hub", "dcp", "out"))
    for command in (["shard", hub, dcp, "--mesh", "dp_shard=2"], ["gather", dcp, out]):
        assert main([*command, "-q"]) == 0
        error = capsys.readouterr().err
        assert "warning: lm_head.weight and transformer.wte.weight differ" in error
        assert 'Write "tie_word_embeddings": false into config.json' in error
    config.write_text(json.dumps(values | {"tie_word_embeddings": False}))
    assert main(["shard", hub, str(tmp_path / "untied"), "--mesh", "dp_shard=2", "-q"]) == 0
    assert "differ" not in capsys.readouterr().err


def test_infinity_as_transformers_5_writes_it_is_a_number(tmp_path) -> None:
    config = transformers.Mamba2Config(
        num_heads=4, head_dim=16, hidden_size=32, state_size=8, n_groups=1, num_hidden_layers=1, vocab_size=9
    )
    saved = transformers.Mamba2ForCausalLM(config)
    saved.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    values = read_config(str(tmp_path)).values
    assert values["time_step_limit"] == [0.0, float("inf")]
    model = zoo.build("Mamba2ForCausalLM", dict(values), "meta")
    load_checkpoint(poisoned(model), tmp_path)
    assert differing(model, saved) == []
