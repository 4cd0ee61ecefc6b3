"""Whose tokenizer, template and config a model gets: the step's own, in any layout; then --assets', then --like's.

What transformers makes of the result is the judge.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import peft
import pytest
import torch
import toys
import transformers
from formats.saved import save_ranks
from steps import toy_steps
from tokenizers import Tokenizer, models

from ckpt_tools.cli import main
from ckpt_tools.convert.assets import choose_assets, model_beside

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{number}" for number in range(64)]


def tokenizer(words: list[str], *, template: str, eos: str) -> transformers.PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0", eos_token=eos)
    made.chat_template = template
    return made


@pytest.fixture
def base(tmp_path: Path) -> Path:
    toys.build("llama").save_pretrained(tmp_path / "base")
    tokenizer(WORDS, template="the base's", eos="w1").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What a trainer saved at the end: three words more than the base has, another end and template."""
    live = toys.build("llama", seed=5)
    live.resize_token_embeddings(67)
    live.generation_config.max_new_tokens = 3
    live.save_pretrained(tmp_path / "trained")
    words = [*WORDS, "<think>", "</think>", "<end>"]
    tokenizer(words, template="the step's", eos="<end>").save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def state_of(model: Path) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in transformers.AutoModelForCausalLM.from_pretrained(model).state_dict().items()}


def assets_to(directory: Path, model: Path) -> None:
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)


def leave_trainer(step: Path, model: Path) -> Path:
    toy_steps.save_trainer(step)
    shutil.rmtree(step / "pytorch_model_fsdp_0")
    toy_steps.save({"model": state_of(model)}, step / "pytorch_model_fsdp_0")
    return step


def leave_dcp(step: Path, model: Path) -> Path:
    toy_steps.save(state_of(model), step)
    return step


def leave_lightning(step: Path, model: Path) -> Path:
    toy_steps.save({"state_dict": {f"model.{name}": tensor for name, tensor in state_of(model).items()}}, step)
    torch.save({"epoch": 1}, step / "meta.pt")
    return step


def leave_verl(step: Path, model: Path) -> Path:
    from torch.distributed.tensor import Shard

    save_ranks(step / "actor", state_of(model), {"fsdp": 2}, lambda _: [Shard(0)])
    return step / "actor/huggingface"


def leave_sharded(step: Path, model: Path) -> Path:
    assert main(["shard", str(model), str(step), "--mesh", "dp_shard=2", "-q"]) == 0
    return step


LAYOUTS = {f.__name__: f for f in (leave_trainer, leave_dcp, leave_lightning, leave_verl)}
"""Trainer's layout → how a step is left; returns where the trainer puts a tokenizer and a config."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_has_its_own_and_that_is_said(layout: str, base: Path, trained: Path, tmp_path: Path, capsys) -> None:
    step, out = tmp_path / "step-5", tmp_path / "out"
    assets_to(LAYOUTS[layout](step, trained), trained)
    assert main(["gather", str(step), str(out), "--assets", str(base)]) == 0
    said = capsys.readouterr().err
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (trained / name).read_bytes()
    files = "chat_template.jinja, tokenizer.json, tokenizer_config.json"
    assert f"note: {files}: the step's own; that of --assets {base} differs" in said
    assert f"note: config.json: the step's own; that of --assets {base} differs" in said
    made = transformers.AutoTokenizer.from_pretrained(out)
    assert (made.eos_token, made.chat_template, len(made)) == ("<end>", "the step's", 67)
    live = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert live.generation_config.max_new_tokens == 3
    assert all(torch.equal(tensor, live.state_dict()[name]) for name, tensor in state_of(trained).items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_own", [False, True])
def test_step_without_its_own_has_the_bases_and_equal_files_are_silent(layout, has_own, base, tmp_path, capsys) -> None:
    step, out = tmp_path / "step-5", tmp_path / "out"
    home = LAYOUTS[layout](step, base)
    if has_own:
        assets_to(home, base)
    assert main(["gather", str(step), str(out), "--assets", str(base)]) == 0
    assert "differs" not in (said := capsys.readouterr().err)
    assert "left out, that" not in said
    for file in base.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes() or file.suffix == ".safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_of_other_sizes_is_refused_and_the_hint_leads_on(layout, base, trained, tmp_path, capsys) -> None:
    step, out = tmp_path / "step-5", tmp_path / "out"
    home = LAYOUTS[layout](step, trained)
    argv = ["gather", str(step), str(out), "--assets", str(base)]
    assert main(argv) == 4
    said = capsys.readouterr().err
    assert (
        ".weight has 67 rows, but config.json has vocab_size 64: config.json does not belong to these weights" in said
    )
    assert "hint: pass --assets DIR" in said
    assert not out.exists()
    assert main(["gather", str(step), str(out), "--assets", str(trained), "-q"]) == 0
    transformers.AutoModelForCausalLM.from_pretrained(out)
    home.mkdir(exist_ok=True)
    shutil.copy(base / "config.json", home)  # the step's own is wrong
    assert main([*argv, "--overwrite"]) == 4
    assert "hint: correct it, or move it away and pass --assets DIR" in capsys.readouterr().err
    (home / "config.json").unlink()
    assert main(["gather", str(step), str(out), "--assets", str(trained), "-q", "--overwrite"]) == 0


def test_what_shard_wrote_and_the_reference_come_in_their_order(base, trained, tmp_path, capsys) -> None:
    sharded, plain = tmp_path / "sharded", tmp_path / "plain"
    leave_sharded(sharded, trained)
    leave_dcp(plain, base)
    assert main(["gather", str(sharded), str(tmp_path / "a"), "--assets", str(base)]) == 0
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    capsys.readouterr()
    more = tmp_path / "more"
    more.mkdir()
    shutil.copy(trained / "generation_config.json", more)
    assert main(["gather", str(plain), str(tmp_path / "b"), "--assets", str(more), "--like", str(base)]) == 0
    said = capsys.readouterr().err
    assert f"generation_config.json: that of --assets {more}; that of --like {base} differs" in said
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_watch_takes_the_steps_own_as_gather_does(base: Path, trained: Path, tmp_path: Path) -> None:
    step = tmp_path / "run/checkpoint-5"
    assets_to(leave_trainer(step, trained), trained)
    argv = ["watch", str(tmp_path / "run"), "--once", "--gather", str(tmp_path / "out"), "--assets", str(base), "-q"]
    assert main([*argv, "--settle", "0"]) == 0
    (made,) = (tmp_path / "out").rglob("tokenizer.json")
    assert made.read_bytes() == (trained / "tokenizer.json").read_bytes()


def test_merge_takes_the_adapters_tokenizer_and_the_bases_config(base: Path, tmp_path: Path, capsys) -> None:
    live = peft.get_peft_model(
        toys.build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    live.save_pretrained(tmp_path / "adapter")
    tokenizer(WORDS, template="the adapter's", eos="w2").save_pretrained(tmp_path / "adapter")
    assert main(["merge-lora", str(base), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert f"that of {tmp_path / 'adapter'}; that of the base differs" in capsys.readouterr().err
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (made.eos_token, made.chat_template) == ("w2", "the adapter's")
    assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()


MODEL = json.dumps({"model_type": "llama"})


@pytest.mark.parametrize(
    ("own", "other", "taken", "said"),
    [
        # the tokenizer is one owner's: no merges of the base beside another vocabulary
        (
            {"tokenizer.json": "1"},
            {"tokenizer.json": "2", "merges.txt": "2", "config.json": MODEL},
            {"tokenizer.json": "1", "config.json": MODEL},
            ["tokenizer.json: the own; the other differs", "merges.txt: left out, the other; the tokenizer is the own"],
        ),
        # the same tokenizer, of which the base has more files
        ({"tokenizer.json": "1"}, {"tokenizer.json": "1", "vocab.json": "2"}, None, []),
        # a template alone is no tokenizer
        (
            {"chat_template.jinja": "1"},
            {"tokenizer.json": "2", "chat_template.jinja": "2"},
            {"tokenizer.json": "2", "chat_template.jinja": "1"},
            [
                "chat_template.jinja: the own; the other differs",
                "chat_template.jinja: the own; the rest of the tokenizer is the other",
            ],
        ),
        # two tokenizers without a file in common
        (
            {"tokenizer.model": "1"},
            {"tokenizer.json": "2"},
            {"tokenizer.model": "1"},
            ["tokenizer.json: left out, the other; the tokenizer is the own"],
        ),
        ({"config.json": "{}"}, {"config.json": MODEL}, {"config.json": "{}"}, ["config.json: the own; the other"]),
        ({"config.json": MODEL}, {"config.json": "{}"}, {"config.json": MODEL}, ["config.json: the own; the other"]),
        (
            {"preprocessor_config.json": "1"},
            {"video_preprocessor_config.json": "2", "generation_config.json": "2", "1_Pooling/config.json": "2"},
            {"preprocessor_config.json": "1", "generation_config.json": "2", "1_Pooling/config.json": "2"},
            ["video_preprocessor_config.json: left out, the other; the processor is the own"],
        ),
    ],
)  # fmt: skip
def test_files_that_mean_something_together_are_of_one_owner(own, other, taken, said, tmp_path: Path) -> None:
    for name, files in (("own", own), ("other", other)):
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
    with ExitStack() as stack:
        owners = [(f"the {name}", model_beside(str(tmp_path / name), stack)[0]) for name in ("own", "other")]
        assets, notes = choose_assets(owners)
        found = {asset.file: source.read(asset.file, 0, asset.nbytes).decode() for source, asset in assets}
    assert found == (taken or {**other, **own})
    assert len(notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(notes, said, strict=True))
