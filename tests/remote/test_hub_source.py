"""`hf://`: the same results as from a local copy, one commit, few requests, and the token for its host alone."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub.local_hub import READ_TOKEN, WRITE_TOKEN, Fault, Hub
from remote.site import Answer, Asked, part, publish, site
from samples import MODEL, content, files_of, safetensors_bytes, tensor, write_model

from ckpt_tools.checkpoint.formats.hollow_copy import skeleton
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.remote import hub_source
from ckpt_tools.storage.remote.hub_source import parse

COMMIT = "0123456789" * 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_files=4)


def error_of(found: tuple[int, str, str], code: int) -> str:
    assert found[0] == code, found
    return found[2]


@pytest.mark.parametrize(
    ("path", "repo", "revision", "inside"),
    [
        ("hf://org/name", "org/name", "main", ""),
        ("hf://org/name/", "org/name", "main", ""),
        ("HF://org/name", "org/name", "main", ""),
        ("hf://models/org/name@v1.0/sub/dir", "org/name", "v1.0", "sub/dir"),
        ("hf://org/name@refs/pr/3/model.safetensors", "org/name", "refs/pr/3", "model.safetensors"),
        ("https://huggingface.co/org/name", "org/name", "main", ""),
        ("https://huggingface.co/org/name/tree/dev/sub", "org/name", "dev", "sub"),
        ("https://huggingface.co/org/name/blob/main/a.safetensors?download=true", "org/name", "main", "a.safetensors"),
        ("https://huggingface.co/org/name/config.json", "org/name", "main", "config.json"),
    ],
)
def test_address_names_repository_revision_and_path(path: str, repo: str, revision: str, inside: str) -> None:
    found = parse(path)
    assert (found.repo, found.revision, found.path) == (repo, revision, inside)
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    "path", ["hf://", "hf://name", "hf://datasets/org/name", "hf://spaces/org/name", "hf://buckets/org/name",
             "https://huggingface.co/org", "https://huggingface.co/datasets/org/name", "hf://org/na me", "hf://../.."]
)  # fmt: skip
def test_other_addresses_are_refused(path: str) -> None:
    with pytest.raises(UsageError):
        parse(path)


def test_inspect_takes_few_requests_and_bytes(run, hub: Hub, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": tensor("F32", 512, 1024, seed=n) for n in range(8)}
    publish(hub, "org/name", write_model(tmp_path / "m", tensors, num_files=4))
    code, out, _ = run("inspect", "hf://org/name")
    assert code == 0
    assert "tensors   8" in out
    assert len(hub.requests) <= 13
    assert {request.token for request in hub.requests if request.path.startswith("/cdn/")} == {None}
    assert {request.token for request in hub.requests if not request.path.startswith("/cdn/")} == {WRITE_TOKEN}


def test_results_are_those_of_a_local_copy(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    publish(hub, "org/name", model)
    for index, (source, *more) in enumerate([(model,), ("hf://org/name",), ("hf://org/name", "-j", "1")]):
        code, _, err = run("shard", source, tmp_path / f"d{index}", "--mesh", "dp_shard=3", *more)
        assert code == 0
        assert ("at commit" in err) == (index > 0)
    assert files_of(tmp_path / "d0") == files_of(tmp_path / "d1") == files_of(tmp_path / "d2")
    publish(hub, "org/dcp", tmp_path / "d1")
    assert run("gather", "hf://org/dcp", tmp_path / "g1")[0] == run("gather", tmp_path / "d0", tmp_path / "g0")[0] == 0
    assert files_of(tmp_path / "g0") == files_of(tmp_path / "g1")
    assert run("reshard", "hf://org/dcp", tmp_path / "r1", "--mesh", "dp_shard=2")[0] == 0
    assert run("reshard", tmp_path / "d0", tmp_path / "r0", "--mesh", "dp_shard=2")[0] == 0
    assert files_of(tmp_path / "r0") == files_of(tmp_path / "r1")
    assert run("diff", "hf://org/dcp", model)[0] == 0
    assert run("verify", "hf://org/dcp")[0] == 0
    assert run("verify", "hf://org/name/model-00002-of-00004.safetensors")[0] == 3  # a part


def test_branch_that_moves_meanwhile_is_not_noticed(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    run("shard", model, tmp_path / "dcp", "--mesh", "dp_shard=2")
    publish(hub, "org/name", tmp_path / "dcp")
    other = write_model(tmp_path / "other", {"x": tensor("F32", 3)})
    hub.faults.append(Fault("GET .*/tree/", "act", act=lambda: publish(hub, "org/name", other) and None))
    assert run("reshard", "hf://org/name", tmp_path / "d", "--mesh", "dp_shard=3")[0] == 0  # which opens it repeatedly
    assert hub.faults[0].seen == 1
    assert run("diff", tmp_path / "d", model)[0] == 0
    assert sum("/revision/" in request.path for request in hub.requests) == 1


def test_later_command_of_a_long_process_sees_the_new_commit(run, hub, model, tmp_path, monkeypatch) -> None:
    publish(hub, "org/name", model)
    monkeypatch.setattr(hub_source, "MAX_AGE_S", 0.0)
    assert run("diff", "hf://org/name", model)[0] == 0
    publish(hub, "org/name", write_model(tmp_path / "other", {"x": tensor("F32", 3)}))
    assert run("diff", "hf://org/name", model)[0] == 3


def test_broken_connections_and_expired_addresses_are_gone_over(run, hub, model, naps, tmp_path) -> None:
    publish(hub, "org/name", model)
    hub.faults += [
        Fault("GET /cdn/", "truncate", times=3),
        Fault("GET .*model-00003", "cut"),
        Fault("GET .*index.json", status=429, headers={"Retry-After": "7"}),
        Fault("GET .*/tree/", status=503, times=2),
    ]
    assert run("shard", "hf://org/name", tmp_path / "d", "--mesh", "dp_shard=2")[0] == 0
    assert run("diff", tmp_path / "d", model)[0] == 0
    for status in (401, 403, 410):  # this process still knows where redirects led: those addresses have expired
        hub.faults[:] = [Fault("GET /cdn/", status=status)]
        assert run("diff", "hf://org/name", model)[0] == 0
        assert hub.faults[0].seen == 1
    assert max(naps) == 7


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("GET /cdn/", status=503, times=99), "status 503"),
        (Fault("GET .*/revision/", status=500, times=99), "status 500"),
        (Fault("GET /cdn/", "truncate", times=99), "broke"),
        (Fault("GET .*/resolve/", "cut", times=99), "broke"),
        (Fault("GET .*/tree/", status=429, headers={"Retry-After": "86400"}), "wait 86400 s"),
        (Fault("GET .*/revision/", status=200, body={"sha": "main"}), "unexpected"),
        (Fault("GET .*/tree/", status=200, body={"no": "rows"}), "unexpected"),
        (Fault("GET .*/revision/", status=401), "check the name"),
        (Fault("GET .*/resolve/", status=403, times=9, headers={"X-Error-Code": "GatedRepo"}), "gated"),
        (Fault("GET .*/resolve/", status=403, times=9), "may not read this"),
    ],
)  # fmt: skip
def test_faults_that_stay_are_told(run, hub: Hub, naps, tmp_path: Path, fault: Fault, says: str) -> None:
    publish(hub, "org/name", write_model(tmp_path / "m", {"x": tensor("F32", 3000)}))
    hub.faults.append(fault)
    if fault.status == 401:
        fault.headers = {"X-Error-Code": "RepoNotFound"}
    err = error_of(run("verify", "hf://org/name"), 1)
    assert says in err
    assert sum(naps) < 175


def test_private_repository_is_read_with_a_token_and_named_without(run, hub: Hub, model: Path, monkeypatch) -> None:
    publish(hub, "org/name", model)
    hub.repos["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert run("inspect", "hf://org/name")[0] == 0
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in error_of(run("inspect", "hf://org/name"), 1)


def test_revisions_paths_and_destinations(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    publish(hub, "org/name", model)
    nested = tmp_path / "nested"
    write_model(nested / "a" / "b")
    commit = publish(hub, "org/name", nested, ref="dev")
    assert run("diff", "hf://org/name@dev/a/b", model)[0] == 0
    assert run("diff", f"hf://org/name@{commit.oid}/a/b", model)[0] == 0
    assert "no such revision" in error_of(run("inspect", "hf://org/name@none"), 4)
    assert "no such file or directory" in error_of(run("inspect", "hf://org/name/none"), 4)
    assert "no such repository" in error_of(run("inspect", "hf://org/none"), 1)
    assert "ckpt push" in error_of(run("shard", model, "hf://org/new", "--mesh", "dp_shard=2"), 2)


def cache(hub: Hub, name: str, where: Path, *, only: str = "") -> Path:
    """Lay a commit down as `hf download` does."""
    repo = hub.repos[name]
    commit = repo.at("main")
    root = where / ("models--" + name.replace("/", "--"))
    for path, file in commit.files.items():
        if not path.startswith(only):
            continue
        blob = root / "blobs" / (file.sha256 if file.is_lfs else file.row(path)["oid"])
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.content)
        link = root / "snapshots" / commit.oid / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit.oid)
    return root


def test_local_cache_is_used_for_what_it_has(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    publish(hub, "org/name", model)
    cache(hub, "org/name", tmp_path / "hub-cache", only="model-")
    code, _, err = run("shard", "hf://org/name", tmp_path / "d", "--mesh", "dp_shard=2")
    assert code == 0
    assert "4 of its files are read from the local cache" in err
    assert not any("model-" in request.path for request in hub.requests)
    assert run("diff", tmp_path / "d", model)[0] == 0


def test_cached_file_of_other_content_is_not_used(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    publish(hub, "org/name", model)
    root = cache(hub, "org/name", tmp_path / "hub-cache")
    for blob in (root / "blobs").iterdir():
        blob.rename(blob.with_name("0" * len(blob.name)) if len(blob.name) == 64 else blob)
    for link in (root / "snapshots").rglob("model-*"):
        link.unlink()
        link.symlink_to(root / "blobs" / ("0" * 64))
    assert run("diff", "hf://org/name", model)[0] == 0
    assert any("/cdn/" in request.path for request in hub.requests)


def test_offline_reads_the_cache_alone(run, hub: Hub, model: Path, tmp_path: Path, monkeypatch) -> None:
    publish(hub, "org/name", model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in error_of(run("inspect", "hf://org/name"), 1)
    root = cache(hub, "org/name", tmp_path / "hub-cache")
    assert run("diff", "hf://org/name", model)[0] == 0
    next((root / "snapshots").rglob("model-00002*")).unlink()
    hub_source._pinned.clear()
    assert "1 of 4 files of the index are missing" in error_of(run("inspect", "hf://org/name"), 4)
    assert hub.requests == []


def a_hub(pages: dict, held: bytes, *, oid: str = "ab" * 32) -> dict:
    """Pages of a hub with one file."""
    row = {
        "type": "file",
        "path": "model.safetensors",
        "size": len(held),
        "oid": "c" * 40,
        "lfs": {"oid": oid, "size": len(held)},
    }
    return {
        "/api/models/org/name/revision/main": json.dumps({"sha": COMMIT}).encode(),
        f"/api/models/org/name/tree/{COMMIT}": json.dumps([row]).encode(),
        f"/org/name/resolve/{COMMIT}/model.safetensors": held,
        **pages,
    }


HELD = safetensors_bytes(MODEL)
FILE = f"/org/name/resolve/{COMMIT}/model.safetensors"
TREE = f"/api/models/org/name/tree/{COMMIT}"


def moved(location: str):
    return lambda _: Answer(302, {"Location": location})


def rows(*paths: str) -> bytes:
    return json.dumps([{"type": "file", "path": path, "size": 1, "oid": "c" * 40} for path in paths]).encode()


@pytest.mark.parametrize(
    ("pages", "code", "says"),
    [
        ({FILE: moved("file:///etc/passwd")}, 1, "not followed"),
        ({FILE: moved("http://169.254.169.254/latest/meta-data")}, 1, "private or local address"),
        ({FILE: moved("http://2852039166/latest")}, 1, "private or local address"),
        ({FILE: moved("http://[::ffff:169.254.169.254]/")}, 1, "private or local address"),
        ({FILE: moved("http://user:word@localhost/")}, 1, "not followed"),
        ({FILE: moved("")}, 1, "not followed"),
        ({FILE: moved(FILE)}, 1, "5 redirects"),
        ({FILE: lambda a: part(a, HELD, **{"Content-Range": "bytes 7-9/" + str(len(HELD))})}, 1, "7-9 were sent"),
        ({FILE: lambda a: part(a, HELD, **{"Content-Range": "nonsense"})}, 1, "Content-Range"),
        ({FILE: lambda a: part(a, HELD + b"x")}, 1, "the source changed"),
        ({FILE: lambda a: part(a, HELD, **{"X-Linked-Etag": '"other"'})}, 1, "the source changed"),
        ({FILE: lambda a: part(a, HELD, **{"Content-Encoding": "gzip"})}, 1, "compressed"),
        ({TREE: rows("../../etc/passwd")}, 4, "leads out"),
        ({TREE: rows("a//b")}, 4, "leads out"),
        ({TREE: b"[" * 100_000}, 1, "unexpected"),
        ({TREE: b"[1]"}, 1, "unexpected"),
        ({TREE: b'[{"type": "file", "path": "a", "size": -1, "oid": "x"}]'}, 1, "unexpected"),
        ({TREE: lambda a: Answer(200, {"Link": f"<{TREE}?c={a.number}>; rel=next"}, rows("a"))}, 4, "more than 20"),
        ({TREE: lambda a: Answer(200, {"Link": f"<{TREE}?c={a.number}>; rel=next"}, rows(*map(str, range(9999))))}, 4,
         "or 1.00 MiB: 9999 files"),
        ({TREE: lambda _: Answer(200, {"Link": '<https://other.example/x>; rel="next"'}, rows("a"))}, 1,
         "another server"),
    ],
)  # fmt: skip
def test_hostile_hub_is_refused(run, naps, monkeypatch, pages: dict, code: int, says: str) -> None:
    monkeypatch.setattr(hub_source, "_MAX_PAGES", 20)
    monkeypatch.setattr(hub_source, "_MAX_LISTED_BYTES", 1 << 20)
    with site(a_hub(pages, HELD)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        if TREE in pages and callable(pages[TREE]):  # the next page is named in full
            page = pages[TREE]

            def full(asked: Asked) -> Answer:
                answer = page(asked)
                answer.headers = {
                    name: value.replace("</api", f"<{server.url}/api") for name, value in answer.headers.items()
                }
                return answer

            server.pages[TREE] = full
        assert says in error_of(run("verify", "hf://org/name"), code)


@pytest.mark.parametrize(("variable", "folder"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub")])
@pytest.mark.parametrize("named", ["~/c", "$HOME/c", "${CACHES}/c"])
def test_cache_is_where_huggingface_hub_has_it(monkeypatch, tmp_path: Path, variable, folder: str, named: str) -> None:
    """Of what the variables name it is the judge, in a process of its own."""
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in (("HOME", str(tmp_path)), ("CACHES", str(tmp_path)), (variable, named)):
        monkeypatch.setenv(name, value)
    code = (
        "from huggingface_hub import constants; from ckpt_tools.storage.remote.account import hub_directory as of;"
        "print(constants.HF_HUB_CACHE == of('HF_HUB_CACHE') and constants.HF_HOME == of('HF_HOME'), of('HF_HUB_CACHE'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == f"True {tmp_path / 'c' / folder}".rstrip("/")


def test_token_does_not_follow_a_redirect_and_comes_back_home(run, monkeypatch, naps) -> None:
    with site(a_hub({"/elsewhere": HELD}, HELD)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.pages[FILE] = lambda _: Answer(307, {"Location": f"{server.other}/elsewhere?Signature=secretsignature"})
        assert run("verify", "hf://org/name")[0] == 0
        tokens = {asked.path.partition("?")[0]: asked.headers.get("authorization") for asked in server.asked}
        assert tokens["/elsewhere"] is None
        assert tokens[FILE] == f"Bearer {WRITE_TOKEN}"
        server.pages["/elsewhere"] = lambda _: Answer(500)
        hub_source._pinned.clear()
        error_of(run("verify", "hf://org/name"), 1)  # and no message has the signature: `run` looks


def test_file_that_changes_between_ranges_is_noticed(run, monkeypatch, tmp_path: Path) -> None:
    big = safetensors_bytes({"x": tensor("F32", 1 << 20)})
    with site(a_hub({FILE: lambda a: part(a, big, ETag=f'"{a.number > 0}"')}, big)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        err = error_of(run("shard", "hf://org/name", tmp_path / "d", "--mesh", "dp_shard=2"), 1)
    assert "the source changed" in err
    assert not (tmp_path / "d").exists()


def test_answer_with_the_whole_file_is_cut_out(run, monkeypatch) -> None:
    with site(a_hub({FILE: lambda _: Answer(200, {}, HELD)}, HELD)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert run("verify", "hf://org/name")[0] == 0


def test_local_commands_import_nothing_of_the_network(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_tools.cli import main; "
        f"main(['shard', {str(model)!r}, {str(tmp_path / 'd')!r}, '--mesh', 'dp_shard=2', '-q']); "
        "print(sorted({'httpx2', 'huggingface_hub', 'ckpt_tools.storage.remote.web', 'obstore', 'torch'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_children_without_a_network_get_documents_and_headers(hub, environment, monkeypatch, tmp_path) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tensors = {"x": tensor("F32", 1 << 20), "y": tensor("BF16", 7)}
    model = write_model(tmp_path / "m", tensors, num_files=2)
    (model / "tokenizer.json").write_bytes(content(3000))
    publish(hub, "org/name", model)
    with skeleton("hf://org/name") as lent:
        with open_path(lent) as opened, open_path(str(model)) as real:
            assert opened.checkpoint.tensors == real.checkpoint.tensors
        assert Path(lent, "config.json").read_bytes() == (model / "config.json").read_bytes()
        assert Path(lent, "tokenizer.json").read_bytes() == bytes(3000)
    assert not Path(lent).exists()
    with skeleton("hf://org/name", whole=True) as lent:
        assert files_of(Path(lent)) == files_of(model)
    with pytest.raises(UnreadableError) as caught, skeleton("hf://org/name") as lent:
        raise UnreadableError("broken", where=f"{lent}/config.json")
    assert caught.value.where == "hf://org/name/config.json"
    assert skeleton(str(model)).__enter__() == str(model)


def test_adapters_are_found_with_what_stands_beside_them(run, hub: Hub, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    write_model(tmp_path / "base", {f"{name}.weight": tensor("F32", 8, 8)})
    factors = {f"base_model.model.{name}.lora_A.weight": (2, 8), f"base_model.model.{name}.lora_B.weight": (8, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (tmp_path / "lora").mkdir()
    numbers = {each: ("F32", shape, b"\0\0\0\x3f" * 16) for each, shape in factors.items()}
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(safetensors_bytes(numbers))
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    for each in ("base", "lora"):
        publish(hub, f"org/{each}", tmp_path / each)
    for place, base, lora in [
        ("here", tmp_path / "base", tmp_path / "lora"),
        ("there", "hf://org/base", "hf://org/lora"),
    ]:
        code, _, err = run("merge-lora", base, lora, tmp_path / f"merged-{place}")
        assert code == 0
        assert "alpha 6 (adapter_config.json)" in err
        assert run("export-lora", lora, tmp_path / f"peft-{place}", "--to", "peft")[0] == 0
        code, out, _ = run("check-lora", lora)
        assert (code, "rank 2, alpha 6 (adapter_config.json)" in out, "*     peft" in out) == (3, True, True)
    for each in ("merged", "peft"):
        assert files_of(tmp_path / f"{each}-here") == files_of(tmp_path / f"{each}-there")


@pytest.mark.full
def test_dtensor_engine_refuses_other_machines(run, hub: Hub, model: Path, tmp_path: Path) -> None:
    publish(hub, "org/name", model)
    more = ("--mesh", "dp_shard=2", "--engine", "dtensor")
    assert "--engine stream" in error_of(run("shard", "hf://org/name", tmp_path / "d", *more), 2)
    assert not (tmp_path / "d").exists()


def test_smoke_refuses_to_copy_large_weights(run, hub: Hub, model: Path, monkeypatch) -> None:
    publish(hub, "org/name", model)
    monkeypatch.setattr(importlib.import_module("ckpt_tools.preflight.smoke.run"), "DATA_LIMIT_BYTES", 100)
    assert "--model hf://org/name" in error_of(run("smoke", "hf://org/name"), 2)


@pytest.mark.full
def test_model_commands_take_what_is_on_the_hub(run, hub: Hub, tmp_path: Path) -> None:
    import toys

    publish(hub, "org/llama", toys.save("llama", tmp_path / "llama", num_hidden_layers=1))
    code, out, _ = run("estimate", "hf://org/llama", "--mesh", "dp_shard=2")
    assert code == 0
    assert "LlamaForCausalLM" in out
    code, out, err = run("smoke", "hf://org/llama", "--steps", "1")
    assert code == 0, (out, err)
    assert "was copied to this machine" in out + err
