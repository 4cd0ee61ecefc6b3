"""What a checkpoint is, and whether it is whole: judged at opening, obeyed by every command."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from samples import files_of

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.cli import main
from ckpt_tools.errors import PartError

WRITING = ("gather", "shard", "reshard", "average", "extract")


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in toys.build("llama").state_dict().items()}


def put(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(value, path, metadata={"format": "pt"})
    else:
        torch.save(value, path)
    return path


def args(**parallel: int) -> argparse.Namespace:
    return argparse.Namespace(num_layers=2, **parallel)


def _ranks(name: str, count: int, make=lambda state: state):
    return lambda at, state: [put(at / name.format(i), make(state)) for i in reversed(range(count))][-1]


PARTS = {
    "safetensors of 2": lambda at, s: put(at / "model-00001-of-00002.safetensors", s),
    "bin of 2": lambda at, s: put(at / "pytorch_model-00001-of-00002.bin", s),
    "second of 2": lambda at, s: put(at / "model-00002-of-00002.safetensors", s),
    "Meta": _ranks("consolidated.0{}.pth", 2),
    "Meta's second alone": lambda at, s: put(at / "consolidated.01.pth", s),
    "Composer": _ranks("ep1-ba10-rank{}.pt", 2, lambda s: {"state": {"model": s}}),
    "fairscale": _ranks("checkpoint_last-shard{}.pt", 2, lambda s: {"model": s}),
    "fairscale's settings": lambda at, s: put(at / "model.pt", {"model": s, "shard_metadata": {"num": 2}}),
    "torchtune": lambda at, s: [put(at / f"hf_model_000{i}_0.pt", s) for i in (2, 1)][-1],
    "Megatron": _ranks("mp_rank_0{}/model_optim_rng.pt", 2, lambda s: {"model": s}),
    "DeepSpeed, tensor parallel": _ranks("mp_rank_0{}_model_states.pt", 2, lambda s: {"module": s}),
    "DeepSpeed, pipeline": _ranks("layer_0{}-model_00-model_states.pt", 2, lambda s: s),
    "Megatron's settings": lambda at, s: put(
        at / "mp_rank_00/model_optim_rng.pt", {"args": args(tensor_model_parallel_size=2), "model": s}
    ),
    "pipeline": lambda at, s: put(at / "x.pt", {"args": args(pipeline_model_parallel_size=4), "model": s}),
    "NeMo": _ranks("tp_rank_0{}_pp_rank_000/model_weights.ckpt", 2),
    "flat parameters": lambda at, s: put(at / "x.pt", {"_flat_param": torch.zeros(9), "norm.weight": torch.ones(2)}),
}  # fmt: skip
WHOLE = {
    "Meta's only": lambda at, s: put(at / "consolidated.00.pth", s),
    "Composer's only": lambda at, s: put(at / "ep1-ba10-rank0.pt", {"state": {"model": s}}),
    "torchtune's only": lambda at, s: put(at / "hf_model_0001_0.pt", s),
    "one of one": lambda at, s: put(at / "model-00001-of-00001.safetensors", s),
    "Megatron alone": lambda at, s: put(
        at / "mp_rank_00/model_optim_rng.pt", {"args": args(tensor_model_parallel_size=1), "model": s}
    ),
    "epochs": lambda at, s: [put(at / f"epoch_{i}.pt", s) for i in (2, 1)][-1],
}


@pytest.mark.parametrize("kind", PARTS)
def test_part_is_refused_by_what_writes_and_red_in_what_looks(kind, state, tmp_path, capsys):
    file = PARTS[kind](tmp_path / "in", state)
    for source in (file, file.parent):
        if source is not file and main(["inspect", str(source)]) == 4:
            continue  # a directory of several such files: it is not known which belong together
        capsys.readouterr()
        for verb in WRITING if kind == "Meta" else ("gather",):
            more = {
                "shard": ["--mesh", "dp_shard=2"],
                "reshard": ["--mesh", "dp_shard=2"],
                "extract": ["--include", "**"],
            }
            given = [str(source)] if verb != "average" else [str(source), str(source.with_name("consolidated.01.pth"))]
            code = main([verb, *given, str(tmp_path / "out"), *more.get(verb, [])])
            said = capsys.readouterr().err
            assert code == (2 if verb == "reshard" and "not sharded" in said else 4), said
            assert "a part of a model" in said or verb == "reshard"
            assert not (tmp_path / "out").exists()
        assert main(["verify", str(source)]) == 3
        assert "part-of-a-model" in capsys.readouterr().out
        assert main(["inspect", str(source), "--json"]) == 0
        identity = json.loads(capsys.readouterr().out)["identity"]
        assert (identity["whole"], len(identity["evidence"]) > 0) == ("part", True)
        if kind != "flat parameters":
            assert main(["gather", str(source), str(tmp_path / "out"), "--as-part", "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert any("a part of a model, used as it is" in note for note in document["notes"])
            shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("kind", WHOLE)
def test_what_only_looks_like_a_part_is_none(kind, state, tmp_path, capsys):
    file = WHOLE[kind](tmp_path / "in", state)
    assert main(["gather", str(file), str(tmp_path / "out")]) == 0
    assert main(["verify", str(file)]) == 0
    assert api.identify(file).whole != "part"
    (back,) = map(load_file, (tmp_path / "out").glob("*.safetensors"))
    assert back.keys() == state.keys()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    toys.save("llama", tmp_path / "model")
    return tmp_path / "model"


def rewrite(model: Path, change) -> None:
    state = load_file(model / "model.safetensors")
    change(state)
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.full
def test_config_says_what_lacks(model, tmp_path, capsys):
    identity = api.identify(model)
    assert identity.title == "LlamaForCausalLM · 2 layers · 22,688 parameters · f32 · whole"
    assert (identity.hidden_size, identity.num_layers, identity.format) == (32, 2, "hf")
    rewrite(model, lambda state: [state.pop(name) for name in list(state) if "layers.1." in name])
    assert main(["shard", str(model), str(tmp_path / "run"), "--mesh", "dp_shard=2"]) == 4
    said = capsys.readouterr().err
    assert "9 weights of the LlamaForCausalLM in config.json are not here" in said
    api.shard(model, tmp_path / "run", mesh="dp_shard=2", as_part=True)
    assert "on purpose (--as-part)" in api.verify(tmp_path / "run").findings[0].what
    assert api.identify(tmp_path / "run").title.endswith("a part, on purpose")
    api.gather(tmp_path / "run", tmp_path / "back")  # ckpt wrote the part, and knows it
    assert files_of(tmp_path / "back") == files_of(model)


def test_shapes_that_ranks_have_cut_are_a_part_and_resized_ones_are_named(model, tmp_path, capsys):
    head = "model.embed_tokens.weight"
    rewrite(model, lambda state: state.update({head: state[head][:32].clone(), "lm_head.weight": state[head][:32] + 1}))
    assert main(["shard", str(model), str(tmp_path / "run"), "--mesh", "dp_shard=2"]) == 4
    assert "has 32 rows, but config.json has vocab_size 64" in capsys.readouterr().err
    rewrite(model, lambda state: state.update({head: torch.ones(70, 32), "lm_head.weight": torch.ones(70, 32)}))
    assert main(["shard", str(model), str(tmp_path / "run"), "--mesh", "dp_shard=2"]) == 0
    assert "70 rows, but config.json has vocab_size 64" in capsys.readouterr().err


def test_index_that_forgets_a_file_is_part_of_a_model(model, tmp_path, capsys):
    toys.build("llama").save_pretrained(tmp_path / "many", max_shard_size="20KB")
    (index,) = (tmp_path / "many").glob("*.index.json")
    document = json.loads(index.read_text())
    last = max(document["weight_map"].values())
    document["weight_map"] = {name: file for name, file in document["weight_map"].items() if file != last}
    index.write_text(json.dumps(document))
    for config in (True, False):
        assert main(["gather", str(tmp_path / "many"), str(tmp_path / "out")]) == 4
        assert "a part of a model" in capsys.readouterr().err
        (tmp_path / "many" / "config.json").unlink(missing_ok=not config)


def test_tensors_chosen_on_purpose_are_named_as_that(model, tmp_path, capsys):
    api.extract(model, tmp_path / "some", include=["model.layers.**"])
    result = api.verify(tmp_path / "some")
    assert result.ok
    assert [finding.code for finding in result.findings] == ["part-of-a-model"]
    assert "on purpose (--include)" in result.findings[0].what
    rewrite(tmp_path / "some", lambda state: state.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(PartError):  # what lacks there now was not left out by ckpt
        open_path(str(tmp_path / "some"))


def test_every_reader_says_what_it_read(model, tmp_path, capsys):
    api.shard(model, tmp_path / "run", mesh="dp_shard=2")
    title = re.escape("LlamaForCausalLM · 2 layers · 22,688 parameters · f32 · ")
    for command in (
        ["inspect", tmp_path / "run"],
        ["verify", tmp_path / "run"],
        ["diff", model, tmp_path / "run"],
        ["stats", tmp_path / "run"],
        ["gather", tmp_path / "run", tmp_path / "out"],
    ):
        page = tmp_path / f"{command[0]}.html"
        html = [] if command[0] == "gather" else ["--html", page]
        assert main([str(part) for part in (*command, *html)]) == 0
        said = capsys.readouterr()
        assert re.search(title, said.out + said.err)
        assert not html or re.search(title, page.read_text())
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        main([*map(str, command), "--json"])
        document = json.loads(capsys.readouterr().out)
        found = document["identities"] if "identities" in document else [document["identity"]]
        assert [identity["whole"] for identity in found] == ["yes"] * len(found)
