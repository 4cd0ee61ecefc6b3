"""`ckpt push FILE.safetensors REPO`: what is known of an image LoRA, what is asked for, and what others load of it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from adapters.image_models import MODELS, apply_to_model
from adapters.test_diffusers import TOLERANCE, all_modules
from guides.inputs import leave_adapter
from hub.conftest import states, strangers
from hub.local_hub import WRITE_TOKEN, Hub
from hub.test_card import front, write_adapter
from hub.test_card_facts import AI_TOOLKIT, FLUX, card_of, png, write_kohya
from safetensors.torch import load_file, save_file
from samples import write_model

from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
FAMILIES = {"flux1": "flux", "sdxl": "stable-diffusion-xl", "flux2": "flux2", "sd3": "sd3"}  # and the hub's tags
DIFFUSERS = "pytorch_lora_weights.safetensors"


def lora(tmp_path: Path, **header: str) -> Path:
    return write_kohya(tmp_path / "run", **header) / "style.safetensors"


def test_one_line_publishes_the_file_its_copies_and_a_card_that_says_what_is_known(hub: Hub, push, tmp_path: Path):
    file = lora(tmp_path, ss_base_model_version="flux1", ss_steps="1200")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "a.png").write_bytes(png({b"parameters": b"a <b>cat</b>\nSteps: 20"}))
    (tmp_path / "samples" / "b.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "samples" / "b.txt").write_text("a dog")
    before = sorted(path.name for path in file.parent.iterdir())
    options = ("--also", "comfyui,diffusers", "--samples", tmp_path / "samples", "--base-model", FLUX)
    code, _, err = push(file, "me/style", *options, "--instance-prompt", "sks")
    assert code == 0, err
    sent = hub.files("me/style")
    copies = {DIFFUSERS, "style_comfyui.safetensors"}
    assert sent.keys() == {"README.md", "style.safetensors", "images/a.png", "images/b.jpg", *copies}
    assert sent["style.safetensors"] == file.read_bytes()
    assert sorted(path.name for path in file.parent.iterdir()) == before
    card = card_of(hub, "me/style")
    keys = front(card)
    assert (keys["base_model"], keys["library_name"], keys["instance_prompt"]) == (FLUX, "diffusers", "sks")
    assert [row["text"] for row in keys["widget"]] == ["a <b>cat</b>", "a dog"]
    assert "license" not in keys
    assert "| steps | 1200 |" in card
    assert 'load_lora_weights("me/style")' in card
    assert "resolve/main/style_comfyui.safetensors" in card
    # Who can read it and the head of the card come before anything leaves.
    told = err[: err.index("uploading")]
    assert "me/style: public: everybody can read it; --private for you alone" in told
    assert f"base_model: {FLUX}" in told
    assert "FLUX.1: kohya names" in err
    assert "license: not known, and not on the card; --license other --license-name flux-1-dev-non-commercial" in err
    assert f"the license of {FLUX} (flux-1-dev-non-commercial-license) allows is your decision" in err
    assert set(states(json.loads(push(file, "me/style", *options, "--json")[1])).values()) == {"unchanged"}


def test_plan_without_a_token_compares_nothing_and_shows_the_whole_card(hub: Hub, push, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out, err = push(lora(tmp_path), "me/style", "-n", "--license", "mit")
    assert code == 0, err
    assert out.startswith("me/style: public: everybody can read it; --private for you alone\n")
    assert re.findall(r"^  (not compared|new) +\S+ \S+ +(\S+)$", out, re.MULTILINE) == [
        ("not compared", "README.md"),
        ("not compared", "style.safetensors"),
    ]
    assert "2 not compared; at most " in out
    card = "\n".join(line[4:] for line in out.splitlines() if line.startswith("  | "))
    assert front(card + "\n")["license"] == "mit"
    assert card.rstrip().endswith("<!-- /ckpt:settings -->")
    for what in ("base model: not known, and not on the card; --base-model ORG/NAME", FLUX, "trigger words: not known"):
        assert what in err
    assert "license: not" not in err
    assert hub.requests == []
    assert "private\n" in push(lora(tmp_path / "again"), "me/style", "-n", "--private")[1]


def test_what_the_trainer_noted_beside_the_file_is_taken_and_an_older_card_stays(hub: Hub, push_json, tmp_path: Path):
    file = lora(tmp_path)
    (file.parent / "config.yaml").write_text(AI_TOOLKIT + f"      model: {{name_or_path: {FLUX}}}\n")
    document = push_json(file, "me/style")
    keys = front(card_of(hub, "me/style"))
    assert (keys["base_model"], keys["instance_prompt"]) == (FLUX, "p3r5on")
    assert "config.yaml" not in hub.files("me/style")
    assert "| steps | 2000 | config.yaml &#40;as configured&#41; |" in card_of(hub, "me/style")
    assert document["card"] == card_of(hub, "me/style")
    assert document["directory"] == str(file)
    own = b"---\nbase_model: org/FLUX-Kontext\ninstance_prompt: mine\n---\n"
    repo = hub.make("me/other", {"README.md": own})
    push_json(file, "me/other")
    assert len(repo.commits) == 2
    keys = front(card_of(hub, "me/other"))
    assert (keys["base_model"], keys["instance_prompt"]) == ("org/FLUX-Kontext", "mine")
    assert keys["pipeline_tag"] == "image-to-image"  # of the base that the card names


WRONG = {
    "kohya's version": {"ss_base_model_version": "sdxl_base_v1-0"},
    "an older version": {"ss_base_model_version": "sd_v1"},
    "modelspec": {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"},
    "another of this name": {"ss_base_model_version": "wan2_1"},
}


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG)
def test_header_of_another_family_is_refused_until_the_base_is_named(hub: Hub, push_json, tmp_path: Path, header):
    file = lora(tmp_path, **header)
    error = push_json(file, "me/style", "-n", code=2)
    assert "but the modules are those of FLUX.1 or Chroma or HunyuanVideo" in error["what"]
    assert error["where"] == str(file)
    notes = push_json(file, "me/style", "-n", "--base-model", FLUX)["notes"]
    assert any("but the modules are those of FLUX.1" in note for note in notes)
    for base in ("stabilityai/stable-diffusion-xl-base-1.0", "Qwen/Qwen-Image"):
        notes = push_json(lora(tmp_path / base), "me/style", "-n", "--base-model", base)["notes"]
        assert any(f"base model is {base.partition('/')[2]}, but" in note for note in notes), notes


def test_headers_of_the_family_and_unknown_ones_are_no_contradiction(hub: Hub, push_json, tmp_path: Path):
    for version in ("flux1", "flux-1-dev/lora", "Flux.1-dev", "hv", "", "my_own_v2"):
        file = lora(tmp_path / str(len(version)), ss_base_model_version=version)
        assert not any("but the modules" in note for note in push_json(file, "me/style", "-n")["notes"])
    its = lora(tmp_path, ss_base_model="org/flux-of-mine")
    notes = push_json(its, "me/style", "-n", "--base-model", FLUX)["notes"]
    assert f"the file names org/flux-of-mine as its base, --base-model {FLUX}" in notes


def test_what_is_no_image_lora_or_no_program_is_refused_by_the_users_own_names(hub: Hub, push_json, tmp_path: Path):
    llm = write_adapter(tmp_path / "adapter") / "adapter_model.safetensors"
    assert "only a LoRA of an image or video model" in push_json(llm, "me/x", code=2)["what"]
    model = write_model(tmp_path / "model") / "model.safetensors"
    assert push_json(model, "me/x", code=4)["where"].startswith(str(model.parent))
    text = tmp_path / "notes.txt"
    text.write_text("x")
    assert "one .safetensors file" in push_json(text, "me/x", code=2)["what"]
    assert "a LoRA that is one file" in push_json(model.parent, "me/x", "--also", "diffusers", code=2)["what"]
    assert "'peft' is not a program" in push_json(lora(tmp_path), "me/x", "--also", "diffusers, peft", code=2)["what"]
    same = lora(tmp_path / "same").rename(tmp_path / "same" / DIFFUSERS)
    assert "and so is the file called" in push_json(same, "me/x", "--also", "diffusers", code=2)["what"]
    dead = lora(tmp_path / "dead")
    dead.write_bytes(dead.read_bytes()[:-100])
    assert "ckpt-push-" not in str(push_json(dead, "me/x", code=4))
    nothing = push_json(lora(tmp_path / "none"), "me/x", "--exclude", "*.safetensors", code=2)
    assert nothing["where"] == str(tmp_path / "none" / "run")
    secret = lora(tmp_path / "secret", note=f"token {WRITE_TOKEN}")
    assert str(push_json(secret, "me/x", code=2)["where"]).startswith("style.safetensors")
    assert hub.repos == {}


def test_family_that_names_do_not_tell_is_told_by_the_base(hub: Hub, push, tmp_path: Path, monkeypatch):
    """The modules of several families; a link to the file is followed."""
    monkeypatch.chdir(tmp_path)
    leave_adapter(tmp_path / "blobs" / "sha")
    file = tmp_path / "style.safetensors"
    file.symlink_to(tmp_path / "blobs" / "sha")
    code, _, err = push(file, "me/style", "--also", "comfyui")
    assert code == 2
    assert f"name its base (--base-model), or write each copy: ckpt export-lora {file} DIR" in err
    code, _, err = push(file, "me/style", "--also", "comfyui,comfyui", "--base-model", "black-forest-labs/FLUX.2-dev")
    assert code == 0, err
    assert hub.files("me/style").keys() == {"README.md", "style.safetensors", "style_comfyui.safetensors"}
    kohya = lora(tmp_path, ss_base_model_version="flux1")
    scale = {"lora_unet_single_blocks_0_linear2.dora_scale": torch.rand(8, 1)}
    save_file(load_file(kohya) | scale, kohya, metadata={"ss_base_model_version": "flux1"})
    told = push(kohya, "me/dora", "--also", "kohya")[2]
    assert "note: style_kohya.safetensors: dora_scale is LyCORIS'" in told
    assert "note: FLUX.2: diffusers names" in err


def test_file_that_changes_while_it_is_copied_is_not_pushed(hub: Hub, push_json, tmp_path: Path, monkeypatch):
    file, copy_file = lora(tmp_path), shutil.copyfile

    def change(source: str, destination: str) -> None:
        copy_file(source, destination)
        file.write_bytes(file.read_bytes() + b" ")

    monkeypatch.setattr(shutil, "copyfile", change)
    assert "changed" in push_json(file, "me/style", code=1)["what"]
    assert hub.repos == {}


@pytest.mark.full
@pytest.mark.parametrize(("name", "tag"), FAMILIES.items())
def test_stranger_loads_what_the_card_says_and_computes_what_was_trained(hub, push, environment, tmp_path, name, tag):
    """The file is kohya's: its copies are loaded by diffusers as the card's line says, and taken by ComfyUI whole."""
    from adapters.image_models import adapter, to_target

    modules = all_modules(name)
    written = to_target(adapter(modules), "kohya", architecture=name)
    file = tmp_path / "my style v1.safetensors"
    save_file(dict(written.tensors), file, metadata=dict(written.metadata))
    code, _, err = push(file, "me/style", "--also", "diffusers,comfyui", "--base-model", "org/base")
    assert code == 0, err
    assert {tag, "text-to-image"} <= set(front(card_of(hub, "me/style"))["tags"])
    line = re.search(r"^pipeline\.load_lora_weights.*$", card_of(hub, "me/style"), re.MULTILINE)
    (got,) = strangers(environment, tmp_path, f"image:{name}:{line[0]}").values()
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    base = make()
    expected = copy.deepcopy(base)
    apply_to_model(expected, modules)
    with torch.no_grad():
        torch.manual_seed(1)
        given = inputs()
        before, want = (each(**given, return_dict=False)[0] for each in (base, expected))
    assert (got - want).abs().max() <= TOLERANCE * (want - before).abs().max()
    (tmp_path / "comfyui.safetensors").write_bytes(hub.files("me/style")["my_style_v1_comfyui.safetensors"])
    assert main(["check-lora", str(tmp_path / "comfyui.safetensors"), "--for", "comfyui", "-q"]) == 0
