"""The model card: what it says, what it leaves alone, and that its code runs."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fsdp2.ranks import execute, run_ranks
from hub.conftest import states
from hub.local_hub import Hub
from hypothesis import given, strategies as st
from samples import safetensors_bytes, tensor

from ckpt_tools.errors import UnreadableError
from ckpt_tools.hub.card import CardFacts, LoadFacts, build_card, notes_on
from ckpt_tools.hub.front_matter import hub_id_of, read_front_matter

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

FACTS = CardFacts(
    base_model="org/base",
    library="peft",
    tags=("lora",),
    pipeline_tag="text-generation",
    license="apache-2.0",
    load=LoadFacts(is_adapter=True, auto_class="AutoModelForCausalLM"),
    settings=(("lora_alpha", "16", "--alpha"),),
)


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def write_adapter(directory: Path, **config: object) -> Path:
    """A PEFT adapter that nothing is wrong with."""
    directory.mkdir(parents=True)
    fqn = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    values = struct.pack("<32f", *(number / 7 for number in range(1, 33)))
    factors = {fqn.format("A"): ("F32", (4, 8), values), fqn.format("B"): ("F32", (8, 4), values)}
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(factors))
    known = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(known | config))
    return directory


def test_card_without_facts_claims_nothing():
    text = build_card(CardFacts(), repo="me/x")
    assert text == "# x\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_card_of_the_user_keeps_every_letter(newline: str):
    lines = ("---", "# mine", "license:   mit   # really", "tags: [a]", "---", "", "Hello {}", "")
    theirs = newline.join(lines)
    text = build_card(FACTS, repo="me/x", existing=theirs)
    added = f"base_model: org/base{newline}library_name: peft{newline}pipeline_tag: text-generation{newline}"
    head, tail = theirs[: theirs.rindex("---")], theirs[theirs.rindex("---") :]
    assert text == head + added + tail
    assert build_card(FACTS, repo="me/x", existing=text) == text


def test_card_without_front_matter_gets_one_in_front():
    text = build_card(FACTS, repo="me/x", existing="# Mine\n\n---\n\nText\n")
    assert text.endswith("---\n\n# Mine\n\n---\n\nText\n")
    assert front(text)["base_model"] == "org/base"


@pytest.mark.parametrize("bad", ["---\n- a\n---\n", "---\na: [\n---\n", "---\na: !!python/object:os.system {}\n---\n"])
def test_card_with_bad_front_matter_is_refused(bad: str):
    with pytest.raises(UnreadableError, match="front matter"):
        build_card(FACTS, repo="me/x", existing=bad)


@given(st.text(max_size=80), st.text(max_size=80))
def test_card_names_from_files_are_no_markup(name: str, value: str):
    """Whatever a config says: the front matter stays its own, and no link, tag, table cell or heading comes to be."""
    facts = CardFacts(title=name, library="peft", settings=((name, value, "config"),), load=LoadFacts(auto_class=name))
    text = build_card(facts, repo="me/x")
    assert front(text) == {"library_name": "peft"}
    body = text.split("---\n", 2)[2]
    code = re.search(r"```python\n(.*?)```", body, re.DOTALL)[1]
    compile(code, "card", "exec")
    rest = re.sub(r"<!-- /?ckpt:[a-z]+ -->", "", body.replace(code, ""))
    assert not re.search(r"[<>\[\]`*\\]", rest.replace("```python\n```", ""))
    rows = [line for line in rest.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert all(row.count("|") == 4 for row in rows)
    assert sum(line.startswith("#") for line in rest.splitlines()) == 3


@given(
    st.dictionaries(st.sampled_from(["license", "tags", "x"]), st.text(max_size=20), min_size=1), st.text(max_size=60)
)
def test_card_merged_is_valid_and_says_both(keys: dict[str, str], body: str):
    theirs = f"---\n{yaml.safe_dump(keys)}---\n{body}"
    merged = build_card(FACTS, repo="me/x", existing=theirs)
    said = {key: value for key, value in keys.items() if value}  # an empty value is none
    assert read_front_matter(merged) == {
        **read_front_matter(build_card(FACTS, repo="me/x")),
        **{k: v for k, v in keys.items() if k == "x"},
        **said,
    }
    assert merged.endswith(f"---\n{body}")
    assert notes_on(FACTS, CardFacts(), merged) == []


@pytest.mark.parametrize("closed", ["{license: mit}", "license: mit\n..."])
def test_card_whose_mapping_is_closed_stays_as_it_is(closed: str):
    theirs = f"---\n{closed}\n---\nText\n"
    assert build_card(FACTS, repo="me/x", existing=theirs) == theirs
    assert "base_model" in notes_on(FACTS, CardFacts(), theirs)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/data/models/llama", None),
        ("./base/model", None),
        ("../base", None),
        ("base", None),
        ("a/b/c", None),
        ("org/../x", None),
        ("org/name\nlicense: mit", None),
        ("C:\\models\\base", None),
        ("/home/me/.cache/huggingface/hub/models--org--base-7B/snapshots/0123/", "org/base-7B"),
    ],
)
def test_hub_id_of_path_is_none(text: str, expected: str | None):
    assert hub_id_of(text) == expected


def test_push_adapter_card_comes_from_its_config(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/base", use_rslora=True)
    hub.make("org/base")
    document = push_json(adapter, "me/lora", "--license", "mit")
    card = hub.files("me/lora")["README.md"].decode()
    assert front(card)["base_model"] == "org/base"
    assert front(card)["license"] == "mit"
    assert "AutoModelForCausalLM" in card
    assert "| use&#95;rslora | True | adapter&#95;config.json |" in card
    assert all("parameters" in note or note.startswith("not checked: that the base") for note in document["notes"])


def test_push_local_base_model_is_left_out_and_said(hub: Hub, push_json, tmp_path: Path, monkeypatch):
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(("/data/models/base", "models/base")):
        adapter = write_adapter(tmp_path / f"adapter{number}", base_model_name_or_path=path)
        error = push_json(adapter, f"me/lora{number}", code=2)
        assert (f"local path ({path})" in error["what"], error["where"]) == (True, "adapter_config.json")
        assert "--base-model" in error["hint"]
        document = push_json(adapter, f"me/lora{number}", "--accept-assumed")
        assert any(f"local path ({path})" in text for text in document["notes"])
        assert path.encode() not in b"".join(hub.files(f"me/lora{number}").values())
        card = hub.files(f"me/lora{number}")["README.md"].decode()
        assert "base_model" not in front(card)
        assert path not in card
    hub.make("org/base")
    document = push_json(adapter, "me/named", "--base-model", "org/base")
    assert front(hub.files("me/named")["README.md"].decode())["base_model"] == "org/base"
    assert json.loads(hub.files("me/named")["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "models/base"
    assert any("names models/base; the uploaded file names org/base" in note for note in document["notes"])
    assert "is not a hub id" in push_json(adapter, "me/other", "--base-model", "/data/base", code=2)["what"]


def write_card_of_peft(adapter: Path, base: str) -> str:
    """The README that PEFT's save_pretrained writes."""
    text = (
        f"---\nbase_model: {base}\nlibrary_name: peft\ntags:\n- base_model:adapter:{base}\n- lora\n---\n\n"
        f"# Model Card for Model ID\n\nTrained on base_model: {base}\n"
    )
    (adapter / "README.md").write_text(text)
    return text


def test_push_card_that_names_a_path_is_refused_or_named(hub: Hub, push_json, tmp_path: Path):
    """PEFT writes the path that the base was loaded from into its card, and the hub refuses a path, last of all."""
    path = "/home/me/models/base-7B"
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=path)
    text = write_card_of_peft(adapter, path)
    for options in ((), ("-n",), ("--no-card",)):
        error = push_json(adapter, "me/lora", *options, code=4)
        assert (error["where"], path in error["what"]) == ("README.md", True)
        assert "--base-model" in error["hint"]
    assert hub.writes == []
    document = push_json(adapter, "me/lora", "--base-model", "org/base")
    assert any(f"base_model was {path}, now org/base" in note for note in document["notes"])
    card = hub.files("me/lora")["README.md"].decode()
    head, body = text.split("---\n\n")
    more = "base_model_relation: adapter\npipeline_tag: text-generation\n---\n\n"
    assert card == head.replace(path, "org/base") + more + body
    assert (adapter / "README.md").read_text() == text


@pytest.mark.parametrize("base", ["org/base", "gpt2", "[org/a]", '"org/base"', "''", "[]", ""])
def test_push_option_names_another_base(hub: Hub, push_json, tmp_path: Path, base: str):
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/base")
    (adapter / "README.md").write_text(f"---\nbase_model: {base}\n---\nText\n")
    notes = push_json(adapter, "me/lora", "--base-model", "org/other")["notes"]
    assert front(hub.files("me/lora")["README.md"].decode())["base_model"] == "org/other"
    assert any("base_model was" in note for note in notes) == (len(base) > 3)
    config = json.loads(hub.files("me/lora")["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/other"


def test_push_names_the_base_in_the_tag_that_peft_left_open(hub: Hub, push_json, run, tmp_path: Path):
    """PEFT writes base_model: '' and the tag of no base; a card of its template has 200 lines."""
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=None)
    text = "---\nbase_model: ''\nlibrary_name: peft\ntags:\n- 'base_model:adapter:'\n- lora\n---\n" + "More\n\n" * 90
    (adapter / "README.md").write_text(text)
    _, shown, _ = run("push", adapter, "me/lora", "--base-model", "org/other", "-n")
    assert len(shown.splitlines()) < 55
    assert "more lines of README.md (-v shows all)" in shown
    notes = push_json(adapter, "me/lora", "--base-model", "org/other")["notes"]
    keys = front(hub.files("me/lora")["README.md"].decode())
    assert (keys["base_model"], keys["tags"]) == ("org/other", ["base_model:adapter:org/other", "lora"])
    assert "adapter_config.json names no base model; the uploaded file names org/other" in notes


@pytest.mark.parametrize("keys", ["base_model: [org/a, org/b]", "{base_model: org/a}"])
def test_push_card_in_which_the_base_cannot_be_replaced_is_refused(hub: Hub, push_json, tmp_path: Path, keys: str):
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/a")
    (adapter / "README.md").write_text(f"---\n{keys}\n---\nText\n")
    error = push_json(adapter, "me/lora", "--base-model", "org/other", code=2)
    assert ("the base model is org/other" in error["what"], error["where"], hub.writes) == (True, "README.md", [])
    push_json(adapter, "me/lora")
    assert f"---\n{keys}\n" in hub.files("me/lora")["README.md"].decode()


def test_push_card_with_a_path_in_a_list_is_refused(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "README.md").write_text("---\nbase_model: [/data/a, /data/b]\n---\nText\n")
    push_json(adapter, "me/lora", "--base-model", "org/other", code=4)
    assert hub.writes == []


def test_push_card_written_on_the_hub_is_kept(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/base")
    push_json(adapter, "me/lora")
    mine = b"---\nlicense: mit\n---\nWhat I wrote in the browser.\n"
    hub.make("me/lora", {"README.md": mine})
    assert states(push_json(adapter, "me/lora"))["README.md"] == "changed"
    card = hub.files("me/lora")["README.md"].decode()
    assert card.endswith("---\nWhat I wrote in the browser.\n")
    assert front(card)["license"] == "mit"
    assert front(card)["base_model"] == "org/base"
    assert states(push_json(adapter, "me/lora"))["README.md"] == "unchanged"


def test_push_no_card_leaves_the_readme_alone(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "README.md").write_bytes(b"Mine\n")
    push_json(adapter, "me/lora", "--no-card")
    assert hub.files("me/lora")["README.md"] == b"Mine\n"
    push_json(adapter, "me/bare", "--exclude", "README.md")
    assert "README.md" not in hub.files("me/bare")
    push_json(adapter, "me/lora")
    assert hub.files("me/lora")["README.md"].endswith(b"---\n\nMine\n")
    assert (adapter / "README.md").read_bytes() == b"Mine\n"


def test_push_broken_adapter_below_is_refused_as_well(hub: Hub, push_json, tmp_path: Path):
    """Checkpoints of a run, or a collection of adapters: each is what somebody will load."""
    write_adapter(tmp_path / "run" / "step-1")
    later = write_adapter(tmp_path / "run" / "step-2", lora_alpha=0)
    error = push_json(tmp_path / "run", "me/run", code=3)
    assert ("adapter-alpha-zero" in error["what"], hub.writes) == (True, [])
    document = push_json(tmp_path / "run", "me/some", "--exclude", "step-2/*")
    assert document["ok"] is True
    (later / "adapter_config.json").write_text((tmp_path / "run/step-1/adapter_config.json").read_text())
    push_json(tmp_path / "run", "me/run")


@pytest.mark.parametrize("name", ["lora_unet_x.lora_{}.weight", "base_model.model.x.lora_{}.default.weight"])
def test_push_dead_adapter_of_any_name_is_refused(hub: Hub, push_json, tmp_path: Path, name: str):
    """Alone, or beside the base in what a trainer saved."""
    roles = ("down", "up") if "unet" in name else ("A", "B")
    factors = dict(zip(map(name.format, roles), (tensor("F32", 4, 8), ("F32", (8, 4), bytes(128))), strict=True))
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "style.safetensors").write_bytes(safetensors_bytes(factors))
    assert "adapter-zero" in push_json(tmp_path / "loras", "me/loras", code=3)["what"]
    assert hub.requests == []


MAKE = """
import json, os, sys, torch
os.chdir(sys.argv[3])
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
base = LlamaForCausalLM(config)
base.save_pretrained("base")
lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
model = get_peft_model(base, lora)
model.peft_config["default"].base_model_name_or_path = "org/base"
model.save_pretrained("adapter")
print(json.dumps(model.eval()(torch.arange(8)[None]).logits.flatten().tolist()))
"""
"""Saves a base model and an adapter that does something, and prints the adapter's outputs."""


@pytest.mark.full
def test_pushed_adapter_loads_by_the_code_of_its_card(hub: Hub, push_json, environment, tmp_path: Path):
    """Base and adapter go to the hub; the card's code block, as it is, gives the adapter's outputs."""
    (made,) = run_ranks(1, execute, MAKE, tmp_path, backend=None)
    expected = json.loads(made.splitlines()[-1])
    push_json(tmp_path / "base", "org/base", "--no-card")
    push_json(tmp_path / "adapter", "me/lora", "--exclude", "README.md")  # PEFT's own template
    (tmp_path / "adapter" / "README.md").unlink()
    assert states(push_json(tmp_path / "adapter", "me/lora"))["README.md"] == "new"
    card = hub.files("me/lora")["README.md"].decode()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    code += "import json, torch\nprint(json.dumps(model.eval()(torch.arange(8)[None]).logits.flatten().tolist()))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
