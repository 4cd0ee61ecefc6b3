"""What users of other tools suffer: every failure is produced with the real tool, and ckpt says what it is.

Where an installed version has been repaired, what the older one left behind is made by its own steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from adapters import families
from adapters.comfyui_keys import patched
from adapters.image_models import COMPONENT, MODELS, adapter, apply_to_model, linears, lora, to_target
from adapters.test_diffusers import TOLERANCE, load as load_in_diffusers
from adapters.test_names import native_weights
from adapters.world_models import LANGUAGE
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

LLAMA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
CASE = families.Case(LLAMA)
PEFT_FILE = "adapter_model.safetensors"


def command(capsys, *argv):
    """Run ckpt: exit code, and what it says in JSON."""
    capsys.readouterr()
    code = main([*map(str, argv), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out or shown.err)


def errors(document):
    return {finding["code"] for finding in document["findings"] if finding["severity"] == "error"}


def hints(document):
    return " ".join(finding["hint"] or "" for finding in document["findings"])


def save_base(path, kind="llama"):
    with warnings.catch_warnings(action="ignore"):
        families.build(kind).save_pretrained(path)
    return path


def save_peft(path, case=CASE):
    with warnings.catch_warnings(action="ignore"):
        families.adapt(case).save_pretrained(path)
    return path


def assert_answers(directory, expected):
    """Does the merged model answer so? Its float32 sums are in another order."""
    from transformers import AutoModelForCausalLM

    found = answers(AutoModelForCausalLM.from_pretrained(directory).eval())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def edit_config(directory, **changes):
    file = Path(directory, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load_peft(path, model=None):
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(families.build("llama") if model is None else model, path).eval()
    return loaded, [str(warning.message) for warning in caught]


def answers(model):
    return families.outputs(model, "llama")


@pytest.fixture(scope="module")
def trained():
    """What the model with its adapter answers, as long as nothing is lost."""
    return answers(families.adapt(CASE))


@pytest.fixture(scope="module")
def untouched():
    """What the base model answers."""
    return answers(families.build("llama"))


# Truncated and empty adapters


def save_in_two_ways(rank, world_size, directory):
    """What two ranks of FSDP2 leave behind: today's sharded checkpoint, and an older accelerate's pickle."""
    from peft import get_peft_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    model = families.adapt(CASE)
    for block in [module for module in model.modules() if type(module).__name__ in families.BLOCKS]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Trainer, with SHARDED_STATE_DICT.
    families.save_with_accelerate(model, os.path.join(directory, "checkpoint-2000"), rank)
    # FULL_STATE_DICT before accelerate#4206: PEFT's state dict of the sharded model, written by rank 0 alone.
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    if rank == 0:
        torch.save(state, os.path.join(directory, "pytorch_model_fsdp.bin"))
        # What there is to be taken out of that file, which has no other rank's storage.
        parts = {name: tensor.to_local().contiguous() for name, tensor in state.items()}
        save_file(parts, os.path.join(directory, "parts.safetensors"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run_ranks(2, save_in_two_ways, str(directory), timeout=120)
    return directory


@pytest.mark.full
def test_accelerate_4206_pickle_of_rank_0_is_not_opened_and_its_trap_is_named(run, tmp_path, capsys):
    """accelerate#4206: FULL_STATE_DICT of an adapter under FSDP2 held rank 0's slice of every tensor."""
    (tmp_path / "step").mkdir()
    os.link(run / "pytorch_model_fsdp.bin", tmp_path / "step" / "pytorch_model_fsdp.bin")
    for source in (tmp_path / "step", tmp_path / "step" / "pytorch_model_fsdp.bin"):
        code, document = command(capsys, "export-lora", source, tmp_path / "out", "--alpha", "8")
        assert code == 4
        assert "SHARDED_STATE_DICT" in document["error"]["hint"]
        assert "rank 0's part alone" in document["error"]["hint"]
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_accelerate_4206_slices_of_one_rank_are_no_adapter(run, tmp_path, capsys):
    """accelerate#4206: taken out of the pickle, half of every factor looks like an adapter."""
    source = save_peft(tmp_path / "adapter")
    whole = load_file(source / PEFT_FILE)
    parts = load_file(run / "parts.safetensors")
    assert {name: (len(parts[name]), len(whole[name])) for name in whole} == {
        name: (len(tensor) // 2, len(tensor)) for name, tensor in whole.items()
    }
    save_file(parts, source / PEFT_FILE)
    code, document = command(capsys, "check-lora", source)
    assert (code, "adapter-rank" in errors(document)) == (3, True)
    assert "export from the sharded checkpoint" in hints(document)
    code, document = command(capsys, "export-lora", source, tmp_path / "out")
    assert (code, errors(document)) == (3, {"adapter-rank"})
    base = save_base(tmp_path / "base")
    code, document = command(capsys, "merge-lora", base, source, tmp_path / "out")
    assert (code, "adapter-rank" in document["error"]["what"]) == (3, True)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def zero3(tmp_path):
    """PEFT saves a model whose parameters ZeRO-3 has partitioned: placeholders without elements."""
    model = families.adapt(CASE)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_peft_2892_placeholders_of_zero3_are_found_before_they_are_loaded(zero3, tmp_path, capsys):
    """peft#2892, trl#4416: LoRA with ZeRO-3 saves an adapter of empty tensors; PEFT fails with a size mismatch."""
    with pytest.raises(RuntimeError, match=r"size mismatch.*torch.Size\(\[0\]\)"):
        load_peft(zero3)
    code, document = command(capsys, "check-lora", zero3)
    assert (code, errors(document)) == (3, {"adapter-truncated", "loader-rejects"})
    assert "an FSDP or ZeRO-3 run" in hints(document)
    assert not any(report["whole"] for report in document["loaders"])
    code, document = command(capsys, "export-lora", zero3, tmp_path / "out")
    assert (code, errors(document)) == (3, {"adapter-truncated"})
    code, document = command(capsys, "merge-lora", save_base(tmp_path / "base"), zero3, tmp_path / "out")
    assert (code, "adapter-truncated" in document["error"]["what"]) == (3, True)
    assert not (tmp_path / "out").exists()


def test_trl_4416_file_without_a_tensor_loads_in_peft_and_is_refused_here(tmp_path, capsys, untouched):
    """trl#4416: the saved adapter is empty, 40 bytes; PEFT warns of missing keys and answers as the base."""
    with warnings.catch_warnings(action="ignore"):
        families.adapt(CASE).save_pretrained(tmp_path / "adapter", state_dict={})
    assert (tmp_path / "adapter" / PEFT_FILE).stat().st_size < 100
    loaded, said = load_peft(tmp_path / "adapter")
    assert torch.equal(answers(loaded), untouched)
    assert any("missing adapter keys" in text for text in said)
    base = save_base(tmp_path / "base")
    for argv in (("check-lora", tmp_path / "adapter"), ("merge-lora", base, tmp_path / "adapter", tmp_path / "out")):
        code, document = command(capsys, *argv)
        assert code == 4
        assert "an empty adapter" in document["error"]["what"]
        assert "ZeRO-3" in document["error"]["hint"]
    assert not (tmp_path / "out").exists()


# Alpha lost


def test_verl_5325_alpha_of_zero_is_said_and_asked_for(tmp_path, capsys, trained, untouched):
    """verl#5325: model_merger wrote lora_alpha 0, so that the adapter loads without a word and does nothing."""
    source = save_peft(tmp_path / "lora_adapter")
    edit_config(source, lora_alpha=0)
    loaded, _ = load_peft(source)
    assert torch.equal(answers(loaded), untouched)
    code, document = command(capsys, "check-lora", source)
    assert (code, errors(document)) == (3, {"adapter-alpha-zero", "loader-no-op"})
    assert "--alpha VALUE" in hints(document)
    code, document = command(capsys, "check-lora", source, "--for", "vllm")
    assert (code, errors(document)) == (3, {"adapter-alpha-zero", "loader-no-op"})
    for argv in (
        ("export-lora", source, tmp_path / "out"),
        ("merge-lora", save_base(tmp_path / "base"), source, tmp_path / "out"),
    ):
        code, document = command(capsys, *argv)
        assert code == 2
        assert "it is 0 in adapter_config.json" in document["error"]["what"]
        assert "--alpha VALUE" in document["error"]["hint"]
        assert not (tmp_path / "out").exists()
    assert main(["export-lora", str(source), str(tmp_path / "out"), "--alpha", "8"]) == 0
    loaded, _ = load_peft(tmp_path / "out")
    assert torch.equal(answers(loaded), trained)


def test_verl_5325_alpha_of_the_training_run_is_found_beside_it(tmp_path, capsys, trained):
    """verl#5325: since its repair verl writes lora_train_meta.json. Loaders read the 0 all the same; ckpt does not."""
    source = save_peft(tmp_path / "lora_adapter")
    edit_config(source, lora_alpha=0)
    (tmp_path / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    code, document = command(capsys, "check-lora", source, "--for", "peft")
    assert (code, errors(document)) == (3, {"loader-no-op"})
    code, document = command(capsys, "export-lora", source, tmp_path / "out")
    assert (code, document["config"]["lora_alpha"]) == (0, {"value": 8, "source": "lora_train_meta.json"})
    loaded, _ = load_peft(tmp_path / "out")
    assert torch.equal(answers(loaded), trained)


def image_model(name, file=None):
    """The model as it is at first, with an adapter that diffusers has loaded."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if file is not None:
        load_in_diffusers(name, file, **{COMPONENT[name]: model})
    return model


def drawn(model, name):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**MODELS[name][1]())[0]


def image_file(directory, tensors):
    file = directory / "pytorch_lora_weights.safetensors"
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def test_diffusers_14409_alpha_that_the_file_does_not_hold_changes_the_scale(tmp_path, capsys):
    """diffusers#14409: save_lora_weights writes no alpha of its own; what is loaded has another scale."""
    from diffusers import FluxPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    model = image_model("flux1")
    before = drawn(model, "flux1")
    model.add_adapter(LoraConfig(r=4, lora_alpha=1, target_modules=["to_q", "to_v"], init_lora_weights=False))
    meant = drawn(model, "flux1") - before
    FluxPipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=get_peft_model_state_dict(model))
    file = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    wrong = drawn(image_model("flux1", file), "flux1") - before
    assert (wrong - meant).abs().max() > 0.5 * meant.abs().max()
    # That no alpha was there is said; that of the training run comes into the file for good.
    code, document = command(capsys, "check-lora", file)
    assert "convention: alpha = rank where none is written" in document["alpha"]["source"]
    code, document = command(
        capsys, "export-lora", file, tmp_path / "out", "--to", "diffusers", "--alpha", "1", "--architecture", "flux1"
    )
    assert code == 0, document
    right = drawn(image_model("flux1", tmp_path / "out" / file.name), "flux1") - before
    assert (right - meant).abs().max() <= TOLERANCE * meant.abs().max()


def test_alpha_that_no_file_holds_is_never_guessed(tmp_path, capsys, untouched):
    """peft, and every trainer that leaves lora_alpha out: PEFT takes 8 without a word."""
    source = save_peft(tmp_path / "adapter", families.Case(LLAMA | {"lora_alpha": 64}))
    file = source / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["lora_alpha"]
    file.write_text(json.dumps(config))
    loaded, _ = load_peft(source)
    assert loaded.peft_config["default"].lora_alpha == 8
    code, document = command(capsys, "check-lora", source)
    assert (code, "adapter-alpha-missing" in errors(document)) == (3, True)
    code, document = command(capsys, "export-lora", source, tmp_path / "out")
    assert (code, "is not known" in document["error"]["what"]) == (2, True)


# Silent no-op


def test_vllm_34186_prefix_of_another_model_class_is_a_no_op_that_is_said(tmp_path, capsys):
    """vllm#34186: trained on the text model's class, served on the one with vision: no module matches, no error."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):
        get_peft_model(LANGUAGE["gemma3"].build(), config).save_pretrained(tmp_path / "adapter")
        LANGUAGE["gemma3-images"].save(tmp_path / "served")
    code, document = command(capsys, "check-lora", tmp_path / "adapter", "--for", "vllm")
    assert (code, document["verdict"]) == (3, "unknown")  # the names alone are as they should be
    code, document = command(capsys, "check-lora", tmp_path / "adapter", "--base", tmp_path / "served", "--for", "vllm")
    assert (code, errors(document)) == (3, {"adapter-unmatched", "loader-no-op"})
    (report,) = document["loaders"]
    assert (report["matched_modules"], report["unmatched_tensors"]) == (0, 4)
    code, document = command(
        capsys, "export-lora", tmp_path / "adapter", tmp_path / "out", "--base", tmp_path / "served"
    )
    assert (code, errors(document)) == (3, {"adapter-unmatched"})
    assert not (tmp_path / "out").exists()


def image_layers(name, kinds):
    torch.manual_seed(2)
    model = MODELS[name][0]()
    return [lora(path, shape) for path, shape in linears(model).items() if path.endswith(kinds)]


def test_comfyui_9753_names_that_it_does_not_know_patch_nothing(tmp_path, capsys):
    """ComfyUI#9753: an adapter in PEFT's names loads with a warning a key at most, and nothing changes."""
    modules = image_layers("flux1", ("attn.to_q", "attn.to_k", "attn.to_v"))
    tensors = families.loras({m.path: (m.factors["A"], m.factors["B"]) for m in modules}, "base_model.model.")
    config = {"r": 4, "lora_alpha": 2, "target_modules": ["to_q", "to_k", "to_v"]}
    source = families.write_peft(tmp_path / "adapter", tensors, **config)
    native = native_weights("flux1", image_model("flux1"))
    after, unused = patched("flux1", native, tensors)
    assert unused == set(tensors)
    assert all(torch.equal(after[name], native[name]) for name in native)
    code, document = command(capsys, "check-lora", source, "--for", "comfyui", "--architecture", "flux1")
    assert (code, errors(document)) == (3, {"loader-no-op"})
    assert "--to comfyui" in hints(document)
    code, document = command(
        capsys, "export-lora", source, tmp_path / "out", "--to", "comfyui", "--architecture", "flux1"
    )
    assert code == 0, document
    (file,) = (tmp_path / "out").glob("*.safetensors")
    after, unused = patched("flux1", native, load_file(file))
    assert not unused
    assert any(not torch.equal(after[name], native[name]) for name in native)
    assert command(capsys, "check-lora", file, "--for", "comfyui")[0] == 0


@pytest.mark.parametrize(("name", "target"), [("flux1", "peft-style"), ("sd3", "kohya")])
def test_diffusers_9291_names_that_it_drops_are_a_no_op_that_is_said(name, target, tmp_path, capsys):
    """diffusers#9291: names of other tools raise nothing, and the picture is that of the base.

    kohya's FLUX.1 names, which were reported, are converted today; these two are dropped to this day.
    """
    kinds = ("attn.to_q", "attn.to_k", "attn.to_v")
    modules = image_layers(name, kinds)
    tensors = dict(to_target(adapter(modules), "kohya" if target == "kohya" else "comfyui", architecture=name).tensors)
    if target == "peft-style":
        tensors = {k.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): v for k, v in tensors.items()}
        assert {float(v) for k, v in tensors.items() if k.endswith(".alpha")} == {6.0}  # q, k and v are one module
        tensors = {k: v for k, v in tensors.items() if not k.endswith(".alpha")}
    file = image_file(tmp_path / "adapter", tensors)
    before = drawn(image_model(name), name)
    assert torch.equal(drawn(image_model(name, file), name), before)
    code, document = command(capsys, "check-lora", file, "--for", "diffusers", "--architecture", name)
    assert (code, errors(document)) == (3, {"loader-no-op"})
    assert "--to diffusers" in hints(document)
    alpha = ("--alpha", "6") if target == "peft-style" else ()
    code, document = command(
        capsys, "export-lora", file, tmp_path / "out", "--to", "diffusers", "--architecture", name, *alpha
    )
    assert code == 0, document
    changed = image_model(name)
    apply_to_model(changed, modules)
    change = drawn(changed, name) - before
    found = drawn(image_model(name, tmp_path / "out" / file.name), name) - before
    assert (found - change).abs().max() <= TOLERANCE * change.abs().max()


def test_diffusers_9291_kohya_names_of_flux1_load_today(tmp_path, capsys):
    """diffusers#9291: the reported format; ckpt must not cry wolf about what has been repaired."""
    modules = image_layers("flux1", ("attn.to_q", "attn.to_k", "attn.to_v", "ff.net.2"))
    # Of fused single blocks diffusers knows the real sizes alone.
    modules = [module for module in modules if not module.path.startswith("single")]
    file = image_file(tmp_path / "adapter", to_target(adapter(modules), "kohya", architecture="flux1").tensors)
    before = drawn(image_model("flux1"), "flux1")
    assert not torch.equal(drawn(image_model("flux1", file), "flux1"), before)
    assert command(capsys, "check-lora", file, "--for", "diffusers")[0] == 0


def test_diffusers_14088_alphas_under_flux2_own_names_are_refused_there_and_baked_in_here(tmp_path, capsys):
    """diffusers#14088: FLUX.2 under its authors' names loads, and with alphas beside them ends in a ValueError."""
    modules = image_layers("flux2", ("attn.to_q", "attn.to_k", "attn.to_v", "to_qkv_mlp_proj"))
    written = to_target(adapter(modules), "comfyui", architecture="flux2").tensors
    names = {name.rpartition(".lora_")[0] for name in written if ".lora_" in name}
    tensors = {name: tensor.contiguous() for name, tensor in written.items() if not name.endswith(".alpha")}
    half = {f"{name}.alpha": torch.tensor(tensors[f"{name}.lora_A.weight"].shape[0] / 2) for name in names}
    file = image_file(tmp_path / "adapter", tensors)
    before = drawn(image_model("flux2"), "flux2")
    assert command(capsys, "check-lora", file, "--for", "diffusers", "--architecture", "flux2")[0] == 0
    assert not torch.equal(drawn(image_model("flux2", file), "flux2"), before)
    save_file(tensors | half, file)
    with pytest.raises(ValueError, match=r"alpha"):
        image_model("flux2", file)
    code, document = command(capsys, "check-lora", file, "--for", "diffusers", "--architecture", "flux2")
    assert (code, errors(document)) == (3, {"loader-rejects"})
    assert ".alpha" in document["findings"][-1]["what"]
    argv = ("export-lora", file, tmp_path / "out", "--to", "diffusers", "--architecture", "flux2")
    code, document = command(capsys, *argv)
    assert code == 0, document
    # The same change at half of the scale: what the alphas mean, by ComfyUI's own patching.
    native = native_weights("flux2", image_model("flux2"))
    after, unused = patched("flux2", native, tensors | half)
    assert not unused
    full = load_file(tmp_path / "out" / file.name)
    again, _ = patched("flux2", native, full)
    assert any(not torch.equal(after[name], native[name]) for name in native)
    for name in native:
        torch.testing.assert_close(again[name], after[name], rtol=0, atol=1e-6)


# A sharded checkpoint is no adapter


@pytest.mark.full
def test_llamafactory_3573_sharded_checkpoint_becomes_an_adapter(run, tmp_path, capsys, trained):
    """LlamaFactory#3573: PEFT finds no adapter_config.json in pytorch_model_fsdp_0, and with one, no weights."""
    checkpoint = run / "checkpoint-2000"
    inner = tmp_path / "pytorch_model_fsdp_0"
    inner.mkdir()
    for file in (checkpoint / "pytorch_model_fsdp_0").iterdir():
        os.link(file, inner / file.name)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_peft(inner)
    (inner / "adapter_config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(Exception, match=r"[Rr]epo id"):
        load_peft(inner)
    code, document = command(capsys, "check-lora", checkpoint, "--for", "peft")
    assert (code, errors(document)) == (3, {"loader-format"})
    assert "ckpt export-lora" in hints(document)
    code, document = command(capsys, "export-lora", checkpoint, tmp_path / "out")
    assert (code, "--alpha VALUE" in document["error"]["hint"]) == (2, True)
    code, document = command(capsys, "export-lora", checkpoint, tmp_path / "out", "--alpha", "8")
    assert (code, document["verified"]) == (0, True)
    loaded, said = load_peft(tmp_path / "out")
    assert not any("adapter keys" in text for text in said)
    assert torch.equal(answers(loaded), trained)
    # With the configuration that was added in vain, nothing has to be asked.
    code, document = command(capsys, "export-lora", inner, tmp_path / "second")
    assert (code, document["config"]["lora_alpha"]["source"]) == (0, "adapter_config.json")


@pytest.mark.full
def test_axolotl_3294_sharded_checkpoint_is_merged_directly(run, tmp_path, capsys, trained, untouched):
    """axolotl#3294: merge-lora after FSDP2 training finds no adapter that it could load."""
    base = save_base(tmp_path / "base")
    code, document = command(capsys, "merge-lora", base, run / "checkpoint-2000", tmp_path / "merged", "--alpha", "8")
    assert code == 0, document
    assert not torch.allclose(trained, untouched, atol=1e-3)
    assert_answers(tmp_path / "merged", trained)


# Merged equals base


def test_verl_7285_merged_model_that_is_the_base_is_told(tmp_path, capsys, trained):
    """verl#7285: `model_merger merge` writes the base, byte for byte, and the adapter in a directory beside it."""
    base = save_base(tmp_path / "base")
    claimed = save_base(tmp_path / "claimed")
    save_peft(claimed / "lora_adapter")
    edit_config(claimed / "lora_adapter", lora_alpha=0)
    code, document = command(capsys, "diff", base, claimed)
    assert (code, document["equal"]) == (0, True)
    code, document = command(capsys, "merge-lora", base, claimed / "lora_adapter", tmp_path / "merged", "--alpha", "8")
    assert code == 0, document
    code, document = command(capsys, "diff", base, tmp_path / "merged")
    assert (code, len(document["changed"])) == (3, 4)
    assert_answers(tmp_path / "merged", trained)


def test_verl_7285_merge_of_nothing_fails(tmp_path, capsys):
    """verl#7285: a merge that leaves every weight as it was must not look like one that worked."""
    base = save_base(tmp_path / "base")
    with warnings.catch_warnings(action="ignore"):
        from peft import LoraConfig, get_peft_model

        options = {name: value for name, value in LLAMA.items() if name != "peft_type"}
        get_peft_model(families.build("llama"), LoraConfig(**options)).save_pretrained(tmp_path / "untrained")
    code, document = command(capsys, "merge-lora", base, tmp_path / "untrained", tmp_path / "merged")
    assert (code, document["error"]["code"]) == (3, "merge-unchanged")
    assert "the result equals the base" in document["error"]["what"]
    assert not (tmp_path / "merged").exists()


# Serving


def test_vllm_9280_modules_to_save_are_refused_there_and_merged_here(tmp_path, capsys):
    """vllm#9280: "vLLM only supports modules_to_save being None"."""
    case = families.Case(LLAMA | {"modules_to_save": ["lm_head"]}, trained=("modules_to_save",))
    source = save_peft(tmp_path / "adapter", case)
    expected = answers(families.adapt(case))
    assert command(capsys, "check-lora", source, "--base", save_base(tmp_path / "base"), "--for", "peft")[0] == 0
    code, document = command(capsys, "check-lora", source, "--for", "vllm")
    assert (code, errors(document)) == (3, {"loader-rejects"})
    assert "not 'lm_head'" in document["findings"][0]["what"]
    assert "ckpt merge-lora" in hints(document)
    code, document = command(capsys, "merge-lora", save_base(tmp_path / "base"), source, tmp_path / "merged")
    assert code == 0, document
    assert_answers(tmp_path / "merged", expected)


# Memory of a merge

# Not getrusage, whose peak begins with the memory of the process that started this one.
PEAK = """
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""
NUM_LAYERS, WIDTH = 8, 6144
BASE_BYTES = NUM_LAYERS * WIDTH * WIDTH * 2


def peak_of(code, *argv):
    """Peak resident bytes of a Python process of its own, which prints nothing else last."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + PEAK, *map(str, argv)],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def sparse_base(file):
    """A base of 600 MB in bf16 that costs no bytes: nothing but a header before a hole in the file."""
    header, at = {}, 0
    for layer in range(NUM_LAYERS):
        end = at + WIDTH * WIDTH * 2
        header[f"layers.{layer}.weight"] = {"dtype": "BF16", "shape": [WIDTH, WIDTH], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + at)
    return file


@pytest.mark.full
def test_peft_1939_merge_stays_far_below_the_size_of_the_base(tmp_path):
    """peft#1939: merge_and_unload holds the base and more; a 70B model ended in the out-of-memory killer."""
    layers = [str(layer) for layer in range(NUM_LAYERS)]
    factors = {layer: (torch.ones(2, WIDTH) / 2, torch.ones(WIDTH, 2) / 4) for layer in layers}
    tensors = families.loras(factors, "base_model.model.layers.")
    directory = families.write_peft(tmp_path / "adapter", tensors, r=2, lora_alpha=2, target_modules=layers)
    base = sparse_base(tmp_path / "base.safetensors")
    nothing = peak_of("import torch\n")
    ours = peak_of(
        """
        import sys
        from ckpt_tools.cli import main
        assert main(["merge-lora", *sys.argv[1:], "-q"]) == 0
        """,
        base,
        directory,
        tmp_path / "merged",
    )
    (merged,) = (tmp_path / "merged").glob("*.safetensors")
    assert merged.stat().st_size >= BASE_BYTES
    merged.unlink()  # pytest keeps what tests leave
    assert ours < BASE_BYTES
    assert ours - nothing < BASE_BYTES / 4
