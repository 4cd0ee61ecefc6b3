"""What a card says of a run: task and tags, training facts, gallery; and what becomes of a card that is there."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import zlib
from pathlib import Path

import pytest
from hub.conftest import states
from hub.local_hub import Hub
from hub.test_card import FACTS, front, write_adapter
from huggingface_hub import ModelCard
from samples import safetensors_bytes, write_model

from ckpt_tools import api
from ckpt_tools.errors import UsageError
from ckpt_tools.hub.card import CardFacts, Sample, build_card, facts_in
from ckpt_tools.hub.facts import tag_of, task_of_adapter, task_of_class
from ckpt_tools.hub.gallery import add_gallery
from ckpt_tools.hub.training import training_of

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

FLUX = "black-forest-labs/FLUX.1-dev"
AI_TOOLKIT = """
config:
  process:
    - trigger_word: "p3r5on"
      train: {steps: 2000, lr: 1.0e-4, optimizer: adamw8bit, batch_size: 1}
      sample:
        prompts: ["[trigger] in a | <b>wood</b>", "second: 'one'"]
"""


def card_of(hub: Hub, repo: str) -> str:
    return hub.files(repo)["README.md"].decode()


def write_kohya(directory: Path, **metadata: str) -> Path:
    """A LoRA for FLUX.1 in kohya's names."""
    directory.mkdir(parents=True)
    factors = {}
    for name, width in (("lora_unet_double_blocks_0_img_attn_proj", 8), ("lora_unet_single_blocks_0_linear2", 40)):
        down = ("F32", (4, width), struct.pack(f"<{4 * width}f", *range(4 * width)))
        factors |= {f"{name}.lora_down.weight": down, f"{name}.alpha": ("F32", (), b"\0\0\x80@")}
        factors[f"{name}.lora_up.weight"] = ("F32", (8, 4), struct.pack("<32f", *range(1, 33)))
    (directory / "style.safetensors").write_bytes(safetensors_bytes(factors, metadata=metadata))
    return directory


def png(texts: dict[bytes, bytes], kind: bytes = b"tEXt") -> bytes:
    chunks = [(b"IHDR", bytes(13)), *((kind, key + b"\0" + text) for key, text in texts.items()), (b"IEND", b"")]
    body = b"".join(
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_push_lora_of_a_picture_model_has_the_card_that_people_want(hub: Hub, push_json, tmp_path: Path):
    run = {"ss_base_model_version": "flux1", "ss_steps": "1200"}
    meta = {**run, "ss_optimizer": "torch.optim.adamw.AdamW(weight_decay=0.1)", "ss_seed": "None"}
    meta["ckpt_assumed"] = "use_rslora=false, alpha_pattern={}"
    secret = {"modelspec.trigger_phrase": "sks <b>dog</b>", "ss_dataset_dirs": '{"/home/me/x": 1}'}
    lora = write_kohya(tmp_path / "lora", **meta, **secret)
    own = ["--license-name", "flux-1-dev", "--license-link", "https://x.y/z", "--language", "en"]
    assert "use_rslora=false" in push_json(lora, "me/style", "--base-model", FLUX, code=2)["what"]
    assert hub.writes == []
    push_json(lora, "me/style", "--accept-assumed", "--base-model", FLUX, *own, "--tag", "cute", "--dataset", "me/data")
    card = card_of(hub, "me/style")
    assert front(card) == {
        "base_model": FLUX,
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "license": "other",
        "license_name": "flux-1-dev",
        "license_link": "https://x.y/z",
        "language": ["en"],
        "datasets": ["me/data"],
        "pipeline_tag": "text-to-image",
        "tags": [
            f"base_model:adapter:{FLUX}",
            *("lora", "text-to-image", "flux", "diffusers", "template:sd-lora", "cute"),
        ],
        "instance_prompt": "sks <b>dog</b>",
    }
    assert ModelCard(card).data.to_dict() == front(card)
    body = card.split("---\n", 2)[2]
    assert "<b>" not in body
    assert "/home/me" not in card
    assert 'load_lora_weights("me/style", weight_name="style.safetensors")' in body
    assert "ComfyUI/models/loras" in body
    assert "| steps | 1200 | header of the weights |" in body
    assert "| optimizer | AdamW | header of the weights |" in body
    assert "seed" not in body
    assert "| alpha&#95;pattern | &#123;&#125; | assumed&#58; not recorded |" in body
    # Again, without a word: what the card says stays, and so does every letter.
    assert set(states(push_json(lora, "me/style", "--accept-assumed")).values()) == {"unchanged"}
    assert card_of(hub, "me/style") == card


def test_push_lora_of_an_unknown_base_does_not_say_which_task(hub: Hub, push_json, tmp_path: Path):
    document = push_json(write_kohya(tmp_path / "lora", ss_sd_model_name="flux1.safetensors"), "me/style")
    keys = front(card_of(hub, "me/style"))
    assert not {"pipeline_tag", "base_model", "base_model_relation"} & keys.keys()
    assert any("flux1.safetensors" in note for note in document["notes"])
    assert "flux1.safetensors" not in card_of(hub, "me/style")


def test_push_large_rank_is_said_to_vllm(hub: Hub, push_json, tmp_path: Path):
    push_json(write_adapter(tmp_path / "a", base_model_name_or_path="org/base"), "me/a")
    assert "vllm serve org/base --enable-lora --lora-modules a=me/a" in card_of(hub, "me/a")
    other = write_adapter(tmp_path / "b", base_model_name_or_path="org/base", r=24)
    fqn = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    values = struct.pack("<192f", *range(1, 193))
    factors = {fqn.format("A"): ("F32", (24, 8), values), fqn.format("B"): ("F32", (8, 24), values)}
    (other / "adapter_model.safetensors").write_bytes(safetensors_bytes(factors))
    push_json(other, "me/b")
    assert "--enable-lora --max-lora-rank 32 --lora-modules" in card_of(hub, "me/b")


def test_push_result_of_ckpt_says_how_it_was_made(hub: Hub, push_json, tmp_path: Path):
    weight = {"model.layers.0.self_attn.q_proj.weight": ("BF16", (8, 8), b"\x80\x3f" * 64)}
    config = {"config.json": b'{"architectures": ["OwnForCausalLM"], "model_type": "llama"}'}
    base = write_model(tmp_path / "base", weight, assets=config)
    api.merge_lora(base, write_adapter(tmp_path / "adapter"), tmp_path / "merged")
    hub.make("org/base")
    document = push_json(tmp_path / "merged", "me/merged", "--base-model", "org/base")
    keys = front(card_of(hub, "me/merged"))
    assert (keys["base_model"], keys["base_model_relation"]) == ("org/base", "finetune")
    assert "| by | ckpt" in card_of(hub, "me/merged")
    assert all("parameters" in note for note in document["notes"])
    document = push_json(tmp_path / "merged", "me/silent")
    assert any("--base-model" in note for note in document["notes"])
    assert "base_model_relation" not in front(card_of(hub, "me/silent"))
    (base / "lora.safetensors").write_bytes((write_kohya(tmp_path / "lora") / "style.safetensors").read_bytes())
    push_json(base, "me/base", "--base-model", "org/base")  # an adapter beside a model does not make it one
    assert front(card_of(hub, "me/base"))["library_name"] == "transformers"
    assert "base_model_relation" not in front(card_of(hub, "me/base"))
    push_json(base, "me/tuned", "--base-model", "org/base", "--base-model-relation", "finetune")
    assert front(card_of(hub, "me/tuned"))["base_model_relation"] == "finetune"
    wide = {"model.layers.0.self_attn.q_proj.weight": ("BF16", (128, 128), b"\x80\x3f" * 128 * 128)}
    api.gather(write_model(tmp_path / "wide", wide, assets=config), tmp_path / "fp8", quantize="fp8")
    push_json(tmp_path / "fp8", "me/fp8", "--base-model", "org/base")
    assert front(card_of(hub, "me/fp8"))["base_model_relation"] == "quantized"


def test_training_facts_are_numbers_and_words_alone(tmp_path: Path):
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoint-5"
    step.mkdir(parents=True)
    (step / "trainer_state.json").write_text('{"global_step": 5, "epoch": 0.5, "best_metric": NaN}')
    (run / "trainer_state.json").write_text('{"global_step": 99}')  # of the end of the run, not of this step
    (run / "axolotl.yaml").write_text(
        "base_model: org/b\nlearning_rate: 2.0e-5\nnum_epochs: 3\nmax_steps: -1\n"
        "optimizer: /home/me/adam\nlr_scheduler: '<b>x</b>'\noutput_dir: /home/me\n"
    )
    (run / "other.yaml").write_text("learning_rate: 1\n")
    assert training_of(str(step)) == (
        ("steps", "5", "trainer_state.json"),
        ("epochs", "0.5", "trainer_state.json"),
        ("learning rate", "2e-05", "axolotl.yaml (as configured)"),
    )
    (step / "trainer_state.json").write_text("{")
    assert [row[0] for row in training_of(str(step))] == ["epochs", "learning rate"]
    assert training_of("s3://bucket/step") == ()


def test_training_facts_of_ai_toolkit(tmp_path: Path):
    header = {"training_info": '{"step": 500, "epoch": 3}', "software": '{"name": "ai-toolkit", "repo": "https://x"}'}
    lora = write_kohya(tmp_path / "run", **header)
    (lora / "config.yaml").write_text(AI_TOOLKIT)
    found = {name: (value, source) for name, value, source in training_of(str(lora / "style.safetensors"))}
    assert found["steps"] == ("500", "header of the weights")
    assert found["trained with"] == ("ai-toolkit", "header of the weights")
    assert found["learning rate"] == ("0.0001", "config.yaml (as configured)")


GRAPH = {
    "3": {"class_type": "KSampler", "inputs": {"positive": ["6", 0], "negative": ["7", 0]}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a graph's cat"}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "bad"}},
}
TWO = GRAPH | {"9": {"inputs": {"positive": ["7", 0]}}}
STEPS = {"9__000000500_0.jpg": b"x", "8__000000250_0.jpg": b"y", "9__000000500_1.jpg": b"z"}
KOHYA = ("n_000100_00_20240101120000_42.png", "n_e000002_01_20240101120000.png")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.jpg": b"x", "a.txt": b"a\n  cat: 'x'\n"}, {"a.jpg": "a cat: 'x'"}),
        ({"a.webp": b"x", "a.json": b'{"caption": "c"}'}, {"a.webp": "c"}),
        ({"a.mp4": b"x", "a.json": b"{"}, {"a.mp4": None}),
        ({"a.png": png({b"parameters": b"dog, best\nNegative prompt: no\nSteps: 20"})}, {"a.png": "dog, best"}),
        ({"a.png": png({b"prompt": json.dumps(GRAPH).encode()})}, {"a.png": "a graph's cat"}),
        ({"a.png": png({b"prompt": json.dumps(TWO).encode()})}, {"a.png": None}),
        ({"a.png": png({b"parameters": b"\0\0\0\0caf\xc3\xa9"}, b"iTXt")}, {"a.png": "café"}),
        ({"a.png": png({b"prompt": b"{not json"})}, {"a.png": None}),
        ({"a.png": b"\x89PNG\r\n\x1a\n\xff\xff\xff\xfftEXtx"}, {"a.png": None}),
        (STEPS | {"prompts.txt": b"# no\none --w 5\ntwo\n"}, dict(zip(list(STEPS)[::2], ("one", "two"), strict=True))),
        (dict.fromkeys(KOHYA, b"x") | {"prompts.txt": b"one\ntwo"}, dict(zip(KOHYA, ("one", "two"), strict=True))),
    ],
)
def test_samples_have_the_prompts_that_stand_beside_or_inside(tmp_path: Path, files, expected):
    (tmp_path / "s").mkdir()
    for name, content in files.items():
        (tmp_path / "s" / name).write_bytes(content)
    local: dict = {}
    gallery, notes = add_gallery(str(tmp_path / "s"), str(tmp_path / "model"), local)
    assert {each.url: each.prompt for each in gallery} == {f"images/{name}": text for name, text in expected.items()}
    assert set(local) == {f"images/{name}" for name in expected}
    assert bool(notes) == (None in expected.values())


def test_push_with_samples_has_a_gallery(hub: Hub, push_json, tmp_path: Path):
    run = write_kohya(tmp_path / "run")
    (run / "config.yaml").write_text(AI_TOOLKIT)
    (run / "samples").mkdir()
    for index in range(2):
        (run / "samples" / f"172__000002000_{index}.jpg").write_bytes(b"\xff\xd8" + bytes([index]))
    push_json(run, "me/style", "--samples", run / "samples")
    keys = front(card_of(hub, "me/style"))
    assert keys["widget"] == [
        {"text": "p3r5on in a | <b>wood</b>", "output": {"url": "samples/172__000002000_0.jpg"}},
        {"text": "second: 'one'", "output": {"url": "samples/172__000002000_1.jpg"}},
    ]
    assert keys["instance_prompt"] == "p3r5on"
    assert "<Gallery />" in card_of(hub, "me/style")
    assert {each["output"]["url"] for each in keys["widget"]} <= set(hub.files("me/style"))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.jpg").write_bytes(b"\xff\xd8new")
    document = push_json(run, "me/style", "--samples", tmp_path / "more")
    assert not any("<Gallery" in note for note in document["notes"])
    assert len(front(card_of(hub, "me/style"))["widget"]) == 3
    assert hub.files("me/style")["images/a.jpg"] == b"\xff\xd8new"
    assert "no image or video" in push_json(run, "me/style", "--samples", tmp_path, code=2)["what"]


def test_samples_of_another_content_are_not_taken_for_those_here(tmp_path: Path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.jpg").write_bytes(b"x")
    local: dict = {}
    add_gallery(str(tmp_path / "s"), str(tmp_path / "m"), local)
    (tmp_path / "s" / "a.jpg").write_bytes(b"y")
    with pytest.raises(UsageError, match="different files"):
        add_gallery(str(tmp_path / "s"), str(tmp_path / "m"), local)


# --- a card that is there


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("tags:\n-   a\n- b\n# mine\nx:   no\n", "tags:\n- a\n- b\n- new\n# mine\nx:   no\n"),
        ("tags:\n  - a\n  - b\n\nx: 1\n", "tags:\n- a\n- b\n- new\n\nx: 1\n"),
        ("tags: [a, b]\n", "tags:\n- a\n- b\n- new\n"),
        ("tags: a\n", "tags:\n- a\n- b\n- new\n"),
        ("tags: [no, 1.0]\n", "tags:\n- 'no'\n- '1.0'\n- b\n- new\n"),
        ("x: &t [a, b]\ntags: *t\n", "x: &t [a, b]\ntags:\n- a\n- b\n- new\n"),
        ('"tags": [a, b]\n', "tags:\n- a\n- b\n- new\n"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_card_lists_are_united_where_asked(tags: str, expected: str, newline: str):
    text = f"---\n# my card\nlicense:   mit\n{tags}---\nText\n".replace("\n", newline)
    asked = CardFacts(tags=("b", "new"))
    merged = build_card(asked, repo="me/x", existing=text, asked=asked)
    assert merged == f"---\n# my card\nlicense:   mit\n{expected}---\nText\n".replace("\n", newline)
    assert build_card(asked, repo="me/x", existing=text) == text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_card_sections_of_ckpt_are_written_anew_and_nothing_else(newline: str):
    first = build_card(FACTS, repo="me/x").replace("\n", newline)
    mine = first.replace("<!-- ckpt:load -->", f"Mine {{}}.{newline}<!-- ckpt:load -->").replace("# x", "# My own")
    old = mine.replace("| 16 |", "| 8 |")
    assert build_card(FACTS, repo="me/x", existing=old) == mine
    without = mine.replace("<!-- /ckpt:settings -->", "")
    assert build_card(FACTS, repo="me/x", existing=without) == without  # an end that lacks: it is the user's text
    assert facts_in(mine).base_model == "org/base"


def test_push_options_replace_what_a_card_says_and_say_so(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    text = "---\nbase_model: org/mine\nlicense: mit\ntags:\n---\n<!-- ckpt:load --><!-- /ckpt:load -->\n"
    (adapter / "README.md").write_text(text)
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "a.txt").write_text("cat")
    hub.make("org/other")
    push_json(adapter, "me/a")
    assert 'from_pretrained("org/mine")' in card_of(hub, "me/a")
    document = push_json(adapter, "me/a", "--base-model", "org/other", "--license", "apache-2.0", "--tag", "x")
    notes = [note for note in document["notes"] if "README" in note]
    assert notes == ["README.md: base_model was org/mine, now org/other", "README.md: license was mit, now apache-2.0"]
    card = card_of(hub, "me/a")
    assert 'from_pretrained("org/other")' in card
    assert "org/mine" not in card
    config = json.loads(hub.files("me/a")["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/other"
    push_json(adapter, "me/a", "--base-model", "org/other", "--samples", tmp_path)
    assert card_of(hub, "me/a").index("<Gallery />") < card_of(hub, "me/a").index("<!-- ckpt:load -->")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("head", ["", "---\nlicense: mit\n---\n\n", "---\nlicense: mit\n---\n# Mine\n\n", "# Mine\n"])
def test_card_gets_a_gallery_where_there_is_none(head: str, newline: str):
    facts = CardFacts(gallery=(Sample("a.jpg", "cat"),), samples="s")
    old = f"{head}Text\n```\n# code\n```\n".replace("\n", newline)
    card = build_card(facts, repo="me/x", existing=old, asked=facts)
    section = newline.join(["<!-- ckpt:gallery -->", "<Gallery />", "<!-- /ckpt:gallery -->", "", "Text", ""])
    assert section in card
    assert card.replace(section, f"Text{newline}").endswith(old.partition("---" + newline)[2].rpartition("---")[2])
    assert ModelCard(card).data.widget == [{"text": "cat", "output": {"url": "a.jpg"}}]
    assert build_card(facts, repo="me/x", existing=card, asked=facts) == card


LICENSED = {"license": "mit", "datasets": ["me/d"], "own": 7}
ODD = {
    "plain": "---\nlicense: mit\ndatasets: [me/d]\nown: 7\n---\nText\n",
    "blank line": "\n---\nlicense: mit\ndatasets: [me/d]\nown: 7\n---\nText\n",
    "spaces": "  \n \t\n ---\nlicense: mit\ndatasets: [me/d]\nown: 7\n---\nText\n",
    "bom": "\ufeff---\nlicense: mit\ndatasets: [me/d]\nown: 7\n---\nText\n",
    "bom and blank": "\ufeff\n\n---\nlicense: mit\ndatasets: [me/d]\nown: 7\n---\nText\n",
    "crlf": "---\r\nlicense: mit\r\ndatasets: [me/d]\r\nown: 7\r\n---\r\nText\r\n",
    "blank line and crlf": "\r\n---\r\nlicense: mit\r\ndatasets: [me/d]\r\nown: 7\r\n---\r\nText\r\n",
    "tabs": "\t---\nlicense: mit # mine\t\ndatasets: [me/d]\nown: 7\n---\t\nText\n",
    "quoted keys": "---\n\"license\": 'mit'\n'datasets': [\"me/d\"]\nown: 7\n---\nText\n",
    "anchors": "---\nlicense: &l mit\ndatasets:\n  - me/d\nown: 7\nlicense_too: *l\n---\nText\n",
    "no body": "---\nlicense: mit\ndatasets:\n- me/d\nown: 7\n---",
    "rule below": "---\nown: 7\ndatasets: [me/d]\nlicense: mit\n---\n\n---\nlicense: none\n---\n",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_no_key_of_an_odd_readme_is_lost(hub: Hub, push_json, tmp_path: Path, text: str):
    """As the hub's own client reads it, before and after: here, and on the hub."""
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    (adapter / "README.md").write_bytes(text.encode())
    before = ModelCard.load(adapter / "README.md").data.to_dict()
    assert LICENSED.items() <= before.items()
    hub.make("me/there", {"README.md": text.encode()})
    push_json(adapter, "me/here", "--tag", "new")
    (adapter / "README.md").unlink()
    push_json(adapter, "me/there", "--tag", "new", "--dataset", "me/more")
    for repo in ("me/here", "me/there"):
        (tmp_path / "after.md").write_bytes(hub.files(repo)["README.md"])
        after = ModelCard.load(tmp_path / "after.md").data.to_dict()
        more = {"datasets": ["me/d", "me/more"]} if repo == "me/there" else {}
        assert (before | more).items() <= after.items()
        assert (after["base_model"], "new" in after["tags"]) == ("org/base", True)


@pytest.mark.parametrize(
    "word", ["1e5", "2024-01-01", "no", "0o7", "1_000", "12:30", "0x1F", ".5", "y", "~", "1.0", "+1"]
)
def test_words_that_some_yaml_reads_as_something_else_are_quoted(word: str):
    card = build_card(CardFacts(instance_prompt=word, tags=(word, "a")), repo="me/x")
    assert f"instance_prompt: '{word}'\n" in card
    assert f"- '{word}'\n- a\n" in card
    assert ModelCard(card).data.instance_prompt == word


@pytest.mark.parametrize(
    ("front_matter", "options", "what"),
    [
        ("license: mit\nlicense_name: own", (), "license is mit, but license_name is own"),
        ("base_model_relation: finetune", (), "base_model_relation is finetune, but this is an adapter"),
        ("license: mit", ("--base-model-relation", "merge"), "base_model_relation is merge"),
        ("base_model: stabilityai/stable-diffusion-xl-base-1.0", (), "but the adapter is for llm"),
    ],
)
def test_card_that_contradicts_itself_is_refused(hub: Hub, push_json, tmp_path: Path, front_matter, options, what):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    (adapter / "README.md").write_text(f"---\n{front_matter}\n---\n")
    error = push_json(adapter, "me/a", *options, code=2)
    assert (what in error["what"], error["where"], hub.writes) == (True, "README.md", [])
    assert error["hint"]


def test_new_license_takes_the_old_ones_name_along(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    push_json(adapter, "me/a", "--license-name", "own", "--license-link", "https://x.y/z")
    notes = push_json(adapter, "me/a", "--license", "mit")["notes"]
    assert "README.md: license_name was own, now removed" in notes
    keys = front(card_of(hub, "me/a"))
    assert (keys["license"], "license_name" in keys, "license_link" in keys) == ("mit", False, False)


def test_push_card_that_the_hub_refuses_is_refused_before_anything_is_sent(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    for options in ((), ("-n",)):
        error = push_json(adapter, "me/a", "--license", "mine", *options, code=1)
        assert "license" in error["what"]
        assert error["where"] == "README.md"
    assert hub.writes == []


def test_push_options_of_the_card_are_checked(push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a")
    assert "hub id" in push_json(adapter, "me/a", "--dataset", "/data/x", code=2)["what"]
    push_json(adapter, "me/old", "--dataset", "squad", "-n")
    assert "hub id" in push_json(adapter, "me/a", "--base-model", "base", code=2)["what"]  # as likely a directory
    error = push_json(adapter, "me/a", "--base-model-relation", "x", code=2)
    assert "--base-model-relation must be one of" in error["what"]


# --- tasks


@pytest.mark.parametrize(
    ("family", "base", "task"),
    [
        ("SDXL", None, "text-to-image"),
        ("FluxTransformer2DModel", None, None),
        ("FluxTransformer2DModel", FLUX, "text-to-image"),
        ("FluxTransformer2DModel", "black-forest-labs/FLUX.1-Kontext-dev", "image-to-image"),
        ("QwenImageTransformer2DModel", "Qwen/Qwen-Image-Edit-2509", "image-to-image"),
        ("WanTransformer3DModel", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "image-to-video"),
        ("WanTransformer3DModel", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "text-to-video"),
        ("WanTransformer3DModel", "Wan-AI/Wan2.1-VACE-14B-diffusers", None),
        ("LTXVideoTransformer3DModel", None, None),
        ("Nobody", "org/base", None),
    ],
)
def test_task_of_adapter_is_said_where_it_is_known(family: str, base: str | None, task: str | None):
    assert task_of_adapter(family, base) == task


def test_tasks_of_classes_are_those_of_diffusers():
    """diffusers' own tables of pipelines by task: whatever is said is one of the tasks that they list it under."""
    tables = {"TEXT2IMAGE": "text-to-image", "IMAGE2IMAGE": "image-to-image", "INPAINT": "image-to-image"}
    tables |= {"TEXT2VIDEO": "text-to-video", "IMAGE2VIDEO": "image-to-video", "VIDEO2VIDEO": "video-to-video"}
    tables |= {"TEXT2AUDIO": "text-to-audio"}
    spec = importlib.util.find_spec("diffusers")
    text = (Path(spec.origin).parent / "pipelines" / "auto_pipeline.py").read_text()  # importing it takes 15 s
    listed: dict[str, set[str]] = {}
    table = r"^AUTO_(\w+)_PIPELINES_MAPPING = OrderedDict\((.*?)^\)"
    for name, rows in re.findall(table, text, re.DOTALL | re.MULTILINE):
        for kind in re.findall(r'", (\w+Pipeline)\)', rows):
            listed.setdefault(kind, set()).add(tables.get(name, name))
    said = {name: task_of_class(name) for name in listed}
    wrong = {name: task for name, task in said.items() if task is not None and task not in listed[name]}
    assert wrong == {"ZImageControlNetInpaintPipeline": "image-to-image"}  # listed under text-to-image alone
    assert sum(task is not None for task in said.values()) > 60
    assert [tag_of(name) for name in ("FluxPipeline", "Flux2Pipeline", "ZImagePipeline")] == [
        "flux",
        "flux2",
        "z-image",
    ]
