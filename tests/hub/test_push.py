"""`ckpt push` against a hub: what is sent, what is not, what is proven, and what is never shown."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from hub.conftest import states
from hub.local_hub import READ_TOKEN, WRITE_TOKEN, Fault, File, Hub, blob_id
from samples import MODEL, safetensors_bytes, shard_model, write_model

from ckpt_tools import api
from ckpt_tools.hub.push import MAX_READ_BACK

# The client uploads with an argument that its own HTTP library finds old-fashioned.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = ("config.json", "model.safetensors.index.json", "tokenizer.json")


def local_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_push_new_repository_creates_it_and_proves_what_arrived(hub: Hub, push_json, model: Path):
    before = local_files(model)
    document = push_json(model, "me/model")
    assert document["ok"] is True
    assert document["created"] is True
    assert document["private"] is False
    assert states(document) == dict.fromkeys((*WEIGHTS, *OTHERS, "README.md"), "new")
    assert {file["path"] for file in document["files"] if file["mode"] == "lfs"} == set(WEIGHTS)
    stored = hub.files("me/model")
    assert {path: stored[path] for path in before} == before
    assert document["commit"] == hub.repos["me/model"].refs["main"]
    assert hub.repos["me/model"].at("main").parent == document["parent"]
    # Every byte was asked for again, at the commit and not at the branch, which may have moved on.
    read = [r.path for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]
    assert sorted(read) == sorted(f"/me/model/resolve/{document['commit']}/{path}" for path in stored)
    assert document["checked"] == {"files": 6, "bytes": sum(map(len, stored.values()))}
    assert local_files(model) == before  # the card is sent, not written


def test_push_dry_run_changes_nothing_and_shows_every_state(hub: Hub, push_json, model: Path):
    same, other = (model / "config.json").read_bytes(), b"something else"
    hub.make("me/model", {"config.json": same, "tokenizer.json": other, WEIGHTS[0]: (model / WEIGHTS[0]).read_bytes()})
    document = push_json(model, "me/model", "-n", "--no-card")
    assert states(document) == {
        "config.json": "unchanged",
        "tokenizer.json": "changed",
        WEIGHTS[0]: "unchanged",
        WEIGHTS[1]: "new",
        "model.safetensors.index.json": "new",
    }
    sizes = {name: (model / name).stat().st_size for name in states(document)}
    assert document["sent_bytes"] == sum(sizes[n] for n, state in states(document).items() if state != "unchanged")
    assert {file["path"]: file["nbytes"] for file in document["files"]} == sizes
    assert document["commit"] is None
    assert document["dry_run"] is True
    assert hub.writes == []
    assert len(hub.repos["me/model"].commits) == 1


def test_push_again_sends_nothing_and_check_all_reads_everything(hub: Hub, push_json, model: Path):
    first = push_json(model, "me/model")
    hub.requests.clear()
    document = push_json(model, "me/model")
    assert set(states(document).values()) == {"unchanged"}
    assert document["commit"] is None
    assert document["parent"] == first["commit"]
    assert document["checked"]["files"] == 0
    assert hub.writes == []
    assert push_json(model, "me/model", "--check", "all")["checked"]["files"] == 6


def test_push_changed_file_sends_only_that(hub: Hub, push_json, model: Path):
    push_json(model, "me/model")
    hub.requests.clear()
    (model / "tokenizer.json").write_bytes(b'{"a": 1}\n')
    document = push_json(model, "me/model", "--commit-message", "A new tokenizer\n\nFor a reason.")
    assert [path for path, state in states(document).items() if state != "unchanged"] == ["tokenizer.json"]
    assert hub.puts() == []
    assert document["checked"]["files"] == 1
    assert hub.repos["me/model"].at("main").title.startswith("A new tokenizer")
    assert hub.files("me/model")["tokenizer.json"] == b'{"a": 1}\n'


def test_push_bare_name_is_one_of_the_users_own(hub: Hub, push_json, model: Path):
    assert push_json(model, "model")["repo"] == "me/model"
    assert list(hub.repos) == ["me/model"]


def test_push_pull_request_leaves_main_alone(hub: Hub, push_json, model: Path):
    repo = hub.make("org/model", {"config.json": b"{}"})
    head = repo.refs["main"]
    document = push_json(model, "org/model", "--create-pr")
    assert document["pull_request"] == f"{hub.url}/org/model/discussions/1"
    assert repo.refs["main"] == head
    assert repo.commits[document["commit"]].parent == head
    assert hub.files("org/model", "refs/pr/1")[WEIGHTS[0]] == (model / WEIGHTS[0]).read_bytes()
    assert document["checked"]["files"] == 6


def test_push_without_the_right_to_write_points_to_pull_requests(hub: Hub, push_json, model: Path, monkeypatch):
    repo = hub.make("org/model", {"config.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    error = push_json(model, "org/model", code=1)
    assert "may not write to org/model" in error["what"]
    assert "--create-pr" in error["hint"]
    assert push_json(model, "org/model", "--create-pr")["pull_request"] is not None
    assert len(repo.commits) == 2
    assert "may not create repositories in org" in push_json(model, "org/other", code=1)["what"]


def test_push_revision_goes_to_that_branch(hub: Hub, push_json, model: Path):
    repo = hub.make("me/model")
    repo.refs["next"] = repo.refs["main"]
    document = push_json(model, "me/model", "--revision", "next")
    assert document["revision"] == "next"
    assert repo.refs["next"] == document["commit"] != repo.refs["main"]


def test_push_into_what_belongs_to_somebody_else_is_refused(hub: Hub, push_json, model: Path):
    """Theirs and private looks like nothing at all, until it is to be created."""
    hub.own = ("me",)
    hub.make("you/secret", {"config.json": b"{}"}, private=True)
    hub.make("you/open", {"config.json": b"{}"})
    assert "may not create repositories in you" in push_json(model, "you/secret", code=1)["what"]
    assert "may not create repositories in you" in push_json(model, "you/new", code=1)["what"]
    for options in ((), ("-n",)):
        error = push_json(model, "you/open", *options, code=1)
        assert "may not write to you/open" in error["what"]
        assert "--create-pr" in error["hint"]
    assert hub.puts() == []
    assert {name: len(repo.commits) for name, repo in hub.repos.items()} == {"you/secret": 1, "you/open": 1}
    assert push_json(model, "you/open", "--create-pr")["pull_request"] is not None


def test_push_private_creates_private_and_refuses_a_public_repository(hub: Hub, push, push_json, model: Path):
    code, out, _ = push(model, "me/other", "--dry-run", "--private")
    assert (code, hub.repos) == (0, {})
    assert "me/other, private: would create it; 6 new" in out
    assert push_json(model, "me/other", "--private")["private"] is hub.repos["me/other"].private is True
    hub.make("me/model", private=False)
    hub.requests.clear()
    error = push_json(model, "me/model", "--private", code=1)
    assert "is public" in error["what"]
    assert hub.writes == []


def test_push_large_file_in_parts_arrives_whole(hub: Hub, push_json, tmp_path: Path):
    hub.multipart_over = 1000
    model = write_model(tmp_path / "model", {"weight": ("F32", (1000,), os.urandom(4000))})
    assert push_json(model, "me/model")["ok"] is True
    assert len(hub.puts()) == 5
    assert hub.files("me/model")["model.safetensors"] == (model / "model.safetensors").read_bytes()


def test_push_token_does_not_go_to_another_host(hub: Hub, push_json, model: Path):
    hub.redirect_large = True
    assert push_json(model, "me/model")["checked"]["files"] == 6
    elsewhere = [r for r in hub.requests if r.host == "localhost"]
    assert len(elsewhere) == 2
    assert all(r.token is None for r in elsewhere)
    assert all(r.token is None for r in hub.puts())


def test_push_sharded_checkpoint_goes_with_its_metadata(hub: Hub, push_json, tmp_path: Path):
    run = shard_model(tmp_path)
    (run / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    api.verify(run, accept=["config.json"])
    document = push_json(run, "me/run")
    assert ".metadata" in hub.files("me/run")
    assert "README.md" not in hub.files("me/run")  # no card with code that loads nothing
    assert any("ckpt gather" in text for text in document["notes"])


# --- what is left out, and what is refused before anything is sent


def test_push_leaves_out_hidden_files_and_foreign_links_and_says_so(hub: Hub, push_json, model: Path, tmp_path: Path):
    (model / ".env").write_text("SECRET=1")
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("x")
    (model / ".ckpt-journal").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "private.txt").write_text("x")
    (model / "linked").symlink_to(tmp_path / "elsewhere")
    document = push_json(model, "me/model")
    assert {row["path"]: row["why"] for row in document["left_out"]} == {
        ".env": "hidden",
        ".git/": "hidden",
        ".ckpt-journal": "hidden",
        "linked": "a link to a directory",
    }
    assert set(hub.files("me/model")) == {*WEIGHTS, *OTHERS, "README.md"}


def test_push_leaves_secrets_and_trainers_state_at_home_unless_asked_for(hub: Hub, push_json, model: Path):
    """What Trainer, accelerate and people leave beside the weights; the names of a tokenizer are not among them."""
    state = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "random_states_0.pkl")
    secrets = ("prod.env", "id_ed25519", "credentials.json", "hf_token.txt", "server.key")
    kept = ("added_tokens.json", "special_tokens_map.json", "tokens.txt", "trainer_state.json")
    for name in (*state, *secrets, *kept):
        (model / name).write_text("{}")
    (model / "old").mkdir()
    (model / "old" / "optimizer.bin").write_text("x")
    document = push_json(model, "me/model")
    left_out = {row["path"]: row["why"].partition(";")[0] for row in document["left_out"]}
    assert left_out == dict.fromkeys((*state, "old/optimizer.bin"), "trainer state") | dict.fromkeys(
        secrets, "may hold a secret"
    )
    assert set(hub.files("me/model")) == {*WEIGHTS, *OTHERS, *kept, "README.md"}
    push_json(model, "me/state", "--include", "optimizer.pt")
    assert set(hub.files("me/state")) == {"optimizer.pt"}


@pytest.mark.parametrize("secret", [WRITE_TOKEN, "hf_" + "aB3" * 11 + "x"], ids=["own", "another's"])
def test_push_file_with_a_token_in_it_is_refused(hub: Hub, push_json, model: Path, secret: str):
    (model / "trainer.yaml").write_text(f"output_dir: out\nhub_token: {secret}\n")
    for options in ((), ("-n",), ("--include", "*.yaml")):
        error = push_json(model, "me/model", *options, code=2)
        assert error["where"] == "trainer.yaml, line 2"
        assert "token" in error["what"]
        assert secret not in str(error)
    assert hub.repos == {}
    push_json(model, "me/model", "--exclude", "trainer.yaml")  # as the hint says
    assert "trainer.yaml" not in hub.files("me/model")


def test_push_link_out_of_the_directory_is_refused(hub: Hub, push_json, model: Path, tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    error = push_json(model, "me/model", code=4)
    assert "leads out" in error["what"]
    assert hub.requests == []


def test_push_include_and_exclude_choose_files(hub: Hub, push_json, model: Path):
    (model / "logs").mkdir()
    (model / "logs" / "a.log").write_text("x")
    (model / "logs" / "b.txt").write_text("y")
    document = push_json(model, "me/model", "--exclude", "*.log", "--exclude", "tokenizer.json")
    assert set(hub.files("me/model")) == {*WEIGHTS, *OTHERS[:2], "README.md", "logs/b.txt"}
    assert {"path": "logs/a.log", "why": "--exclude"} in document["left_out"]
    push_json(model, "me/other", "--include", "logs/*.log")
    assert set(hub.files("me/other")) == {"logs/a.log"}
    error = push_json(model, "me/model", "--include", "*.gguf", code=2)
    assert "matches no file" in error["what"]


def test_push_choice_that_tears_a_checkpoint_apart_is_refused(hub: Hub, push_json, model: Path):
    error = push_json(model, "me/model", "--exclude", WEIGHTS[1], code=2)
    assert WEIGHTS[1] in error["what"]
    assert hub.repos == {}


@pytest.mark.parametrize("damage", ["truncated", "missing", "no-index", "no-header"])
def test_push_broken_model_is_refused_before_anything_is_sent(hub: Hub, push_json, model: Path, damage: str):
    part = model / WEIGHTS[1]
    if damage == "truncated":
        part.write_bytes(part.read_bytes()[:-5])
    elif damage == "missing":
        part.unlink()
    elif damage == "no-index":
        (model / "model.safetensors.index.json").unlink()
    else:
        part.write_bytes(b"\0" * 40)
    push_json(model, "me/model", code=4)
    assert hub.requests == []


def test_push_of_values_that_are_not_finite_is_noted(hub: Hub, push_json, tmp_path: Path):
    dtype, shape, raw = MODEL["model.embed.weight"]
    model = write_model(tmp_path / "model", {"model.embed.weight": (dtype, shape, b"\0\0\xc0\x7f" + raw[4:])})
    document = push_json(model, "me/model")
    assert any("tensor 'model.embed.weight': 1 NaN of 96 elements, the first" in text for text in document["notes"])


def test_push_model_that_its_manifest_contradicts_is_refused(hub: Hub, push_json, tmp_path: Path):
    run = shard_model(tmp_path)
    api.gather(run, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    error = push_json(tmp_path / "out", "me/model", code=4)
    assert "is not what was written" in error["what"]
    assert hub.requests == []


@pytest.mark.parametrize("options", [(), ("--no-card",)], ids=["card", "no card"])
def test_push_card_that_is_not_utf8_is_refused_before_anything_is_sent(hub: Hub, push_json, model: Path, options):
    (model / "README.md").write_bytes("# Modèle".encode("utf-16"))
    error = push_json(model, "me/model", *options, code=4)
    assert error["where"] == "README.md"
    assert "me/model" not in hub.repos
    push_json(model, "me/model", "--exclude", "README.md")  # as the hint says
    assert "README.md" not in hub.files("me/model")


def test_push_adapter_without_config_is_refused(hub: Hub, push_json, tmp_path: Path):
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(MODEL))
    assert "adapter_config.json is missing" in push_json(directory, "me/a", code=2)["what"]
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "is left out" in push_json(directory, "me/a", "--exclude", "adapter_config.json", code=2)["what"]
    (directory / "adapter_model.safetensors").unlink()
    assert "no adapter beside" in push_json(directory, "me/a", code=4)["what"]
    assert hub.requests == []


def test_push_stale_weights_are_named_and_deleted_on_request(hub: Hub, push_json, model: Path):
    hub.make("me/model", {"model.safetensors": b"old", "other/model.safetensors": b"another", "notes.md": b"x"})
    dry = push_json(model, "me/model", "-n")
    assert any("model.safetensors; a loader may pick those up" in text for text in dry["notes"])
    document = push_json(model, "me/model", "--delete-stale")
    assert states(document)["model.safetensors"] == "deleted"
    held = hub.files("me/model")
    assert "model.safetensors" not in held
    assert {"other/model.safetensors", "notes.md"} <= set(held)


def test_push_file_the_hub_ignores_is_refused(hub: Hub, push_json, model: Path):
    hub.make("me/model")
    hub.ignored = {WEIGHTS[0]}
    assert states(push_json(model, "me/model", "-n"))[WEIGHTS[0]] == "ignored"
    error = push_json(model, "me/model", code=1)
    assert ".gitignore excludes" in error["what"]
    assert hub.writes == []


def test_push_impossible_arguments_are_usage_errors(hub: Hub, push_json, model: Path, tmp_path: Path, monkeypatch):
    assert "is not a valid repository name" in push_json(model, "a/b/c", code=2)["what"]
    assert "is not a valid repository name" in push_json(model, "me/..", code=2)["what"]
    assert "needs revision main" in push_json(model, "me/m", "--create-pr", "--revision", "x", code=2)["what"]
    assert "--check must be one of sent, all, names" in push_json(model, "me/m", "--check", "x", code=2)["what"]
    assert "needs a directory" in push_json(model / "config.json", "me/m", code=2)["what"]
    assert "no such file or directory" in push_json(tmp_path / "nothing", "me/m", code=4)["what"]
    assert "address" in push_json(model, "me/m", "--endpoint", "localhost:1", code=2)["what"]
    monkeypatch.setenv("HF_TOKEN", "hf_with a space")
    assert "invalid characters" in push_json(model, "me/m", code=2)["what"]
    assert hub.requests == []


# --- what goes wrong on the way


def test_push_commit_in_between_is_not_run_over(hub: Hub, push_json, model: Path):
    repo = hub.make("me/model")

    def somebody_else() -> None:
        repo.add("main", dict(repo.at("main").files), parent=repo.refs["main"], title="theirs")

    hub.faults.append(Fault("/commit/main", kind="act", act=somebody_else))
    error = push_json(model, "me/model", code=1)
    assert "somebody else committed to main meanwhile" in error["what"]
    assert repo.at("main").title == "theirs"
    hub.requests.clear()
    assert push_json(model, "me/model")["ok"] is True
    assert hub.puts() == []  # what had been uploaded is not sent again


STAGES = ["revision/main", "repos/create", "tree/", "validate-yaml", "preupload", "batch", "PUT", "commit", "resolve"]
"""What a push asks of the hub, in its order."""


@pytest.mark.parametrize("where", STAGES)
def test_push_busy_hub_is_asked_again(hub: Hub, push_json, model: Path, naps: list[float], where: str):
    hub.faults.append(Fault(where, status=429, headers={"Retry-After": "3"}))
    hub.faults.append(Fault(where, status=503))
    assert push_json(model, "me/model")["ok"] is True
    assert len(naps) >= 2
    assert max(naps) >= 3  # as it asked
    assert len(hub.repos["me/model"].commits) == 2


@pytest.mark.full
@pytest.mark.parametrize("where", STAGES)
def test_push_hub_that_stays_broken_is_left_in_the_end(hub: Hub, push_json, model: Path, naps: list[float], where: str):
    """A bounded number of tries, an error that says what to do, and nothing that is half there."""
    hub.faults.append(Fault(where, status=502, times=10_000))
    error = push_json(model, "me/model", code=1)
    assert "502" in error["what"]
    assert "again" in error["hint"] or "hub" in error["hint"]
    assert sum(pause for pause in naps if pause >= 0.5) < 360  # 170 for each of two reads
    assert len(hub.requests) < 100
    commits = hub.repos["me/model"].commits if "me/model" in hub.repos else {}
    assert len(commits) == (2 if where == "resolve" else 1 if commits else 0)
    hub.faults.clear()
    assert push_json(model, "me/model", "--check", "all")["ok"] is True
    assert len(hub.repos["me/model"].commits) == 2


@pytest.mark.parametrize("where", ["PUT", "commit/main", "batch", "resolve.*safetensors"])
def test_push_cut_connection_is_survived(hub: Hub, push_json, model: Path, naps: list[float], where: str):
    hub.faults.append(Fault(where, kind="cut", times=2))
    assert push_json(model, "me/model")["ok"] is True
    assert len(hub.repos["me/model"].commits) == 2


SWEPT: dict[str, dict] = {
    "503": {"status": 503},
    "401": {"status": 401},
    "html": {"status": 200, "body": b"<html>Sign in</html>"},
    "cut": {"kind": "cut", "times": 99},
    "lost": {"kind": "lost"},
    "truncate": {"kind": "truncate"},
}


@pytest.mark.timeout(3600)  # with --zoo: hundreds of pushes
@pytest.mark.parametrize("kind", SWEPT)
def test_push_any_request_may_fail(hub: Hub, push, push_json, model: Path, naps, kind: str, request):
    """Whole, or an error and nothing of it there (all of it, where the check alone failed); run again, whole."""
    (model / "README.md").write_text("---\nlicense: mit\n---\nMine\n")
    push_json(model, "me/m0")
    made = [(each.method, each.path) for each in hub.requests]
    whole = {path: content for path, content in hub.files("me/m0").items() if path != ".gitattributes"}
    step = 1 if request.config.getoption("--zoo") else 7
    for at in range([*SWEPT].index(kind) % step, len(made), step):
        repo, (method, path) = f"me/m{at + 1}", made[at]
        hub.objects.clear()
        hub.faults[:] = [Fault(re.escape(f"{method} {path}".replace("me/m0", repo)), **SWEPT[kind])]
        code, _, error = push(model, repo)
        found = hub.files(repo) if repo in hub.repos and hub.repos[repo].refs else {}
        there = {path: found[path] for path in whole if path in found}
        assert code in (0, 1, 3), error
        assert there == whole if code != 1 else there in ({}, whole), (at, method, path, error)
        assert there == {} or code != 1 or "was made" in error or "known" in error, (method, path, error)
        hub.faults.clear()
        assert push_json(model, repo, "--check", "all")["ok"] is True
        assert {path: hub.files(repo)[path] for path in whole} == whole


@pytest.mark.parametrize(("kind", "status"), [("lost", 0), ("late", 504), ("late", 500)])
def test_push_answer_to_the_commit_lost_is_recognised(hub, push_json, model, naps, kind, status):
    hub.faults.append(Fault("/commit/main", kind=kind, status=status))
    document = push_json(model, "me/model")
    assert document["ok"] is True
    assert any("its response was lost" in text for text in document["notes"])
    assert len(hub.repos["me/model"].commits) == 2
    assert document["commit"] == hub.repos["me/model"].refs["main"]


def test_push_answer_to_a_pull_request_lost_is_not_asked_again(hub: Hub, push_json, model: Path, naps: list[float]):
    repo = hub.make("me/model")
    hub.faults.append(Fault("/commit/main", kind="lost"))
    error = push_json(model, "me/model", "--create-pr", code=1)
    assert "/me/model/discussions" in error["hint"]
    assert sum(ref.startswith("refs/pr/") for ref in repo.refs) == 1


def test_push_wrong_bytes_on_the_hub_are_findings(hub: Hub, push_json, model: Path):
    hub.corrupt = {hashlib.sha256((model / WEIGHTS[0]).read_bytes()).hexdigest()}
    document = push_json(model, "me/model", code=3)
    assert document["ok"] is False
    assert [(f["code"], f["where"]) for f in document["findings"]] == [("arrived-different", WEIGHTS[0])]
    # Names and digests alone do not show it, and say that they have not looked.
    blind = push_json(model, "me/model", "--check", "names")
    assert any("not read back" in text for text in blind["notes"])
    assert push_json(model, "me/model", "--check", "all", code=3)["ok"] is False


def test_push_reads_back_from_the_hub_and_not_from_the_cache(hub: Hub, push_json, model, tmp_path, monkeypatch):
    done = push_json(model, "me/model")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    oid = hashlib.sha256((model / WEIGHTS[0]).read_bytes()).hexdigest()
    snapshot = tmp_path / "hub-cache" / "models--me--model" / "snapshots" / done["commit"]
    snapshot.mkdir(parents=True)
    (tmp_path / oid).write_bytes((model / WEIGHTS[0]).read_bytes())
    (snapshot / WEIGHTS[0]).symlink_to(tmp_path / oid)
    hub.corrupt = {oid}
    assert push_json(model, "me/model", "--check", "all", code=3)["ok"] is False


def test_push_file_missing_after_the_commit_is_a_finding(hub: Hub, push_json, model: Path):
    repo = hub.make("me/model")

    def lose() -> None:
        del repo.at("main").files["tokenizer.json"]

    hub.faults.append(Fault("GET /api/models/me/model/revision/[0-9a-f]{40}", kind="act", act=lose))
    document = push_json(model, "me/model", code=3)
    assert [(f["code"], f["where"]) for f in document["findings"]] == [("not-arrived", "tokenizer.json")]


@pytest.mark.parametrize("has_times", [True, False])
def test_push_file_changed_meanwhile_is_not_committed(hub: Hub, push_json, model: Path, monkeypatch, has_times: bool):
    weights = model / WEIGHTS[0]
    if not has_times:  # the content alone tells
        monkeypatch.setattr("ckpt_tools.storage.source.LocalSource.check_unchanged", lambda _: None)

    def train_on() -> None:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    hub.make("me/model")
    hub.faults.append(Fault("preupload", kind="act", act=train_on))
    error = push_json(model, "me/model", code=1)
    assert "changed while it was" in error["what"]
    assert "nothing was committed" in error["what"]
    assert len(hub.repos["me/model"].commits) == 1


LIMIT, QUOTA = {"error": "Private repository storage limit reached"}, {"code": 422, "message": "Storage quota exceeded"}
BATCH_ERROR = {"objects": [{"oid": "a" * 64, "size": 1, "error": QUOTA}]}
GATED, GONE, DAY = {"X-Error-Code": "GatedRepo"}, {"X-Error-Code": "RepoNotFound"}, {"Retry-After": "86400"}
REFUSALS = [
    (Fault("commit", status=401), "does not accept the token", "settings/tokens"),
    (Fault("repos/create", status=403), "may not create repositories in me", "settings/tokens"),
    (Fault("commit", status=403), "may not write to me/model", "--create-pr"),
    (Fault("batch", status=403, body=LIMIT), "out of storage", "billing"),
    (Fault("repos/create", status=402), "payment required", "billing"),
    (Fault("commit", status=413, body={"error": "storage limit of 1TB reached"}), "too large", "--exclude"),
    (Fault("batch", status=200, body=BATCH_ERROR), "Storage quota exceeded", "free storage"),
    (Fault("preupload", status=403, headers=GATED, body={"error": "no"}), "is gated", "request access"),
    (Fault("tree/", status=401, body={"error": "Invalid"}), "does not accept the token", "settings/tokens"),
    (Fault("commit", status=404, headers=GONE), "no such repository", "name"),
    (Fault("commit", status=409), "another change is in progress", "in a minute"),
    (Fault("PUT", status=413), "too large", "--max-shard-size"),
    (Fault("commit", status=412), "somebody else committed", "run the command again"),
    (Fault("commit", status=422, body={"error": "bad name"}), "status 422 (the hub says: bad name)", None),
    (Fault("commit", status=503, times=99), "returned status 503 after 5 tries", "again later"),
    (Fault("commit", kind="cut", times=99), "connection to the hub was lost after 5 tries", "run the command again"),
    (Fault("PUT", status=500, times=999), "uploading: the hub returned status 500", "already uploaded"),
    (Fault("PUT", kind="cut", times=999), "connection to the hub was lost", "run the command again"),
    (Fault("revision/main", status=429, headers=DAY), "retry after 86400 s", "later"),
    (Fault("PUT", status=503, headers=DAY, times=9), "returned status 503", "later"),
    (Fault("preupload", status=200, body={"files": [{"path": 3}]}), "unexpected response", None),
    (Fault("preupload", status=200, body=b"<html>Sign in</html>"), "unexpected response from the hub", "a login page"),
    (Fault("revision/main", status=200, body=b"<html>Sign in</html>"), "unexpected response", "a login page"),
    (Fault("batch", status=200, body={"objects": 3}), "unexpected response from the hub", None),
]


@pytest.mark.parametrize(
    ("fault", "what", "hint"), REFUSALS, ids=[f"{row[0].match}-{row[0].kind}-{row[0].status}" for row in REFUSALS]
)
def test_push_refusal_is_a_clear_error(hub, push_json, model, naps, fault, what, hint):
    hub.faults.append(fault)
    error = push_json(model, "me/model", code=1)
    assert error["code"] == "hub"
    assert what in error["what"]
    assert "me/model" in error["where"]
    assert (hint is None) == (error["hint"] is None) or hint in error["hint"]
    assert max(naps, default=0) <= 120
    assert "me/model" not in hub.repos or len(hub.repos["me/model"].commits) == 1


def test_push_revision_that_is_not_there_is_named(hub: Hub, push_json, model: Path):
    assert "does not exist" in push_json(model, "me/model", "--revision", "next", code=1)["what"]
    hub.make("me/model")
    assert "has no revision 'next'" in push_json(model, "me/model", "--revision", "next", code=1)["what"]
    assert hub.writes == []


@pytest.mark.parametrize(("count", "most"), [(400, 130), pytest.param(10_000, 200, marks=pytest.mark.zoo)])
def test_push_of_many_files_is_proven_in_few_requests(hub: Hub, push_json, model: Path, count: int, most: int):
    for i in range(count):
        (model / f"notes-{i:05d}.txt").write_text(f"{i}\n")
    document = push_json(model, "me/model")
    assert len(hub.requests) <= most
    assert document["checked"]["files"] == MAX_READ_BACK + len(WEIGHTS)
    assert any("compared by git's digests" in note for note in document["notes"])
    assert all(hub.files("me/model")[f"notes-{i:05d}.txt"] == f"{i}\n".encode() for i in range(count))
    assert {*states(push_json(model, "me/model")).values()} == {"unchanged"}


def test_push_to_a_repository_that_was_renamed_names_the_new_one(hub: Hub, push_json, model: Path):
    hub.make("me/new")
    there = {"Location": f"{hub.url}/api/models/me/new/revision/main"}
    hub.faults.append(Fault("GET /api/models/me/model/revision/main", status=307, headers=there))
    error = push_json(model, "me/model", code=1)
    assert (error["what"], error["hint"], hub.writes) == ("me/model has been renamed to me/new", "use me/new", [])


def test_push_failure_after_creation_says_that_the_repository_is_there(hub: Hub, push, model: Path):
    hub.faults.append(Fault("commit", status=403))
    code, _, err = push(model, "me/model")
    assert code == 1
    assert "note: the repository me/model was created" in err


def test_push_check_that_breaks_off_says_what_is_done(hub: Hub, push, model: Path, naps):
    hub.faults.append(Fault("GET .*resolve", status=500, times=99))
    code, _, err = push(model, "me/model")
    assert code == 1
    assert f"commit {hub.repos['me/model'].refs['main']} was made" in err
    assert "--check all" in err


def test_push_hub_that_repeats_the_token_does_not_get_it_shown(hub: Hub, push, model: Path):
    said = f"http://me:hushhush@proxy:1 bad token {WRITE_TOKEN} and hf_AnotherTokenOfSomebody \x1b[31m https://s3.example/x?X-Amz-Signature=abc"
    hub.faults.append(Fault("commit", status=422, body={"error": said}))
    code, out, err = push(model, "me/model", "-v")
    assert code == 1
    assert "bad token ***" in err
    for secret in ("hf_Another", "hushhush", "X-Amz-Signature", "\x1b"):
        assert secret not in out + err


def test_push_leaves_the_client_as_it_was(hub: Hub, push_json, model: Path):
    import logging

    from huggingface_hub.utils import are_progress_bars_disabled, get_session

    before = (logging.getLogger("huggingface_hub").handlers[:], are_progress_bars_disabled())
    push_json(model, "me/model")
    session = get_session()
    assert (logging.getLogger("huggingface_hub").handlers[:], are_progress_bars_disabled()) == before
    assert session.timeout.read is None
    assert session.event_hooks["response"] == []


# --- as a user runs it


@pytest.mark.full
@pytest.mark.parametrize("is_stored", [False, True])
def test_push_process_finds_token_and_endpoint(hub: Hub, push_process, model: Path, tmp_path: Path, is_stored: bool):
    (tmp_path / "hf-home").mkdir()
    (tmp_path / "hf-home" / "token").write_text(WRITE_TOKEN + "\n")
    done = push_process(model, "me/model", **({"HF_TOKEN": None} if is_stored else {}))
    assert done.returncode == 0, done.stderr
    assert "checked: 6 files" in done.stdout
    assert hub.files("me/model")[WEIGHTS[0]] == (model / WEIGHTS[0]).read_bytes()


PROXIES = dict.fromkeys(("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"))
BY_PROXY: dict[str, str | None] = PROXIES | {"NO_PROXY": None, "no_proxy": None}


@pytest.mark.parametrize(("changes", "why"), [({"HF_TOKEN": None}, "no token"), ({"HF_HUB_OFFLINE": "1"}, "offline")])
def test_dry_run_that_cannot_ask_the_hub_shows_what_is_here_and_says_so(hub: Hub, push_process, model, changes, why):
    done = push_process(model, "me/model", "-n", "--private", "--license", "apache-2.0", "--json", **changes)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {*states(document).values()} == {"not compared"}
    assert "README.md" in states(document)
    assert (document["created"], document["private"], document["commit"]) == (False, True, None)
    assert any(text.startswith("not compared with the hub") and why in text for text in document["notes"])
    assert hub.requests == []
    assert push_process(model, "no name", "-n", **changes).returncode == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "what", "hint"),
    [
        ({"HF_TOKEN": None}, "needs a token", "hf auth login"),
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is on", "unset HF_HUB_OFFLINE"),
        ({"HF_TOKEN": "hf_WrongWrongWrongWrong99"}, "does not accept the token", "create a new one"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "after 3 tries: the connection is refused", "HF_ENDPOINT"),
        ({"HF_ENDPOINT": "http://no.such.host.invalid"}, "its name is not found (DNS)", "HF_ENDPOINT"),
        (BY_PROXY | {"ALL_PROXY": "socks4://me:hushhush@127.0.0.1:9"}, "neither http, https nor socks5", "PROXY"),
        (BY_PROXY | {"ALL_PROXY": "socks5://me:hushhush@127.0.0.1:9"}, "pip install socksio", "PROXY"),
        (BY_PROXY | {"HTTP_PROXY": "http://me:hushhush@127.0.0.1:9"}, "cannot reach the hub", "PROXY"),
        (BY_PROXY | {"SSL_CERT_FILE": "/no/such/file.pem"}, "does not exist", "SSL_CERT_FILE"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else None,
)
def test_push_process_that_cannot_be_is_a_clear_error(hub: Hub, push_process, model: Path, changes, what, hint):
    done = push_process(model, "me/model", "-v", **changes)
    assert done.returncode == 1
    assert what in done.stderr
    assert hint in done.stderr
    assert bool(hub.requests) == ("does not accept" in what)
    assert "hf_WrongWrong" not in done.stderr + done.stdout
    assert "hushhush" not in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_push_that_is_stopped_commits_nothing_and_is_run_again(hub, environment, push_json, tmp_path, sent):
    """A file that arrived is not sent again; one that was cut is, from its beginning. The commit is made once."""
    hub.multipart_over = 1000
    weights = {name: ("F32", (1000,), os.urandom(4000)) for name in ("a", "b")}
    model = write_model(tmp_path / "model", weights, num_files=2)
    first, second = (hashlib.sha256((model / name).read_bytes()).hexdigest() for name in WEIGHTS)
    has_ended = threading.Event()
    hub.faults.append(Fault(f"PUT /store/{second}/.*/3$", kind="act", act=lambda: has_ended.wait(60)))
    command = [sys.executable, "-m", "ckpt_tools", "push", str(model), "me/model", "-j", "1"]
    with subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True) as process:
        while not any(r.path.endswith("/3") and second in r.path for r in hub.puts()) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(sent)
        time.sleep(0.2)
        has_ended.set()
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent), err
    if sent == signal.SIGINT:
        assert "error: interrupted; nothing was committed" in err
        assert "already uploaded" in err
    assert len(hub.repos["me/model"].commits) == 1
    hub.requests.clear()
    assert push_json(model, "me/model")["ok"] is True
    assert len(hub.puts()) == (0 if sent == signal.SIGINT else 5)  # an interrupted client ends the file that it sends
    assert not any(first in request.path for request in hub.puts())
    assert hub.files("me/model")[WEIGHTS[1]] == (model / WEIGHTS[1]).read_bytes()
    assert len(hub.repos["me/model"].commits) == 2


def test_push_says_what_somebody_else_changed_and_a_rerun_replaces_no_readme_of_theirs(hub: Hub, push, model: Path):
    (model / "README.md").write_text("---\nlicense: mit\n---\nMine\n")
    assert push(model, "me/model")[0] == 0
    repo = hub.repos["me/model"]
    ours = dict(repo.at("main").files)
    (model / "README.md").write_text("---\nlicense: mit\n---\nMine, again\n")

    def somebody_else() -> None:
        readme = File(b"---\nlicense: mit\nlanguage: de\n---\nTheirs\n", False)
        repo.add("main", ours | {"README.md": readme, "new.txt": readme}, parent=repo.refs["main"], title="theirs")

    hub.faults.append(Fault("/commit/main", kind="act", act=somebody_else))
    code, _, error = push(model, "me/model")
    short = [blob_id(files["README.md"].content)[:12] for files in (repo.at("main").files, ours)]
    assert code == 1
    assert re.search("README.md: theirs {}, ours (?!none)[0-9a-f]{{12}}, base {}\n".format(*short), error)
    assert f"new.txt: theirs {short[0]}, ours none, base none" in error
    assert "nothing of this push was committed" in error
    code, _, error = push(model, "me/model")
    assert (code, repo.at("main").title) == (2, "theirs")
    assert "says something else" in error
    assert "--replace-card" in error
    assert push(model, "me/model", "--exclude", "README.md")[0] == 0
    assert repo.at("main").files["README.md"].content.endswith(b"Theirs\n")
    repo.add("main", dict(repo.at("main").files), parent=repo.refs["main"], title="theirs")
    assert push(model, "me/model", "--replace-card")[0] == 0
    text = repo.at("main").files["README.md"].content.decode()
    assert text.endswith("Mine, again\n")
    assert "language: de\n" in text
    (model / "README.md").write_text("---\nlicense: mit\n---\nMine, last\n")
    assert push(model, "me/model")[0] == 0  # what is there is what was pushed


@pytest.mark.parametrize(
    ("theirs", "held"),
    [
        ("license: apache-2.0\n---\nText\n", None),
        ("license: mit\n---\nAnother\n", None),
        ("license: mit\ntags: [theirs]\nlanguage: de\n---\nText\n", {"tags": ["mine", "theirs"], "language": "de"}),
    ],
    ids=["key", "text", "more"],
)
def test_push_merges_or_leaves_what_another_author_wrote_under_the_same_title(hub: Hub, push, model, theirs, held):
    (model / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\nText\n")
    assert push(model, "me/model")[0] == 0
    repo = hub.repos["me/model"]
    readme, last = File(f"---\n{theirs}".encode(), False), repo.at("main")
    repo.add("main", last.files | {"README.md": readme}, parent=last.oid, title=last.title, author="you")
    code, _, error = push(model, "me/model")
    if held is None:
        assert (code, repo.at("main").files["README.md"]) == (2, readme), error
        assert push(model, "me/model", "--replace-card")[0] == 0
    else:
        front = yaml.safe_load(repo.at("main").files["README.md"].content.decode().split("---")[1])
        assert held.items() <= front.items()


def test_push_does_not_say_that_nothing_was_committed_where_the_history_is_not_read(hub: Hub, push, model: Path):
    repo = hub.make("me/model")

    def somebody_else() -> None:
        repo.add("main", dict(repo.at("main").files), parent=repo.refs["main"], title="theirs")

    hub.faults += [Fault("/commit/main", kind="act", act=somebody_else), Fault("/commits/main", status=403)]
    code, _, error = push(model, "me/model")
    assert (code, "nothing of this push" in error) == (1, False)
    assert "whether this push was committed is not known" in error
