"""`https://`: a file, or an index and what it names; what else a web server can do is not trusted."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from httpcore2._backends.sync import SyncStream
from remote.site import Answer, part, site
from samples import MODEL, files_of, safetensors_bytes, tensor, write_model

from ckpt_tools.storage.remote import web
from ckpt_tools.storage.remote.server_checks import Peers

HELD = safetensors_bytes(MODEL)


def error_of(found: tuple[int, str, str], code: int) -> str:
    assert found[0] == code, found
    return found[2]


def test_index_is_a_directory_with_its_files_and_known_documents(run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_files=3)
    pages = {f"/a%20b/{path.name}": path.read_bytes() for path in model.iterdir()}
    with site(pages) as server:
        source = f"{server.url}/a%20b/model.safetensors.index.json"
        assert run("shard", source, tmp_path / "d1", "--mesh", "dp_shard=2")[0] == 0
        assert run("shard", model, tmp_path / "d0", "--mesh", "dp_shard=2")[0] == 0
        assert files_of(tmp_path / "d0") == files_of(tmp_path / "d1")
        assert run("diff", source, model)[0] == 0
        assert run("verify", f"{server.url}/a%20b/model-00001-of-00003.safetensors")[0] == 3  # a part
        assert all("authorization" not in asked.headers for asked in server.asked)


def test_documents_that_are_empty_or_forbidden_do_no_harm(run) -> None:
    pages = {
        "/model.safetensors.index.json": json.dumps({"weight_map": dict.fromkeys(MODEL, "m.safetensors")}).encode(),
        "/m.safetensors": HELD,
        "/tokenizer.json": lambda _: Answer(416, {"Content-Range": "bytes */0"}),
        "/config.json": lambda _: Answer(403),
        "/generation_config.json": b"{}",
    }
    with site(pages) as server:
        code, out, _ = run("inspect", f"{server.url}/model.safetensors.index.json")
    assert code == 0
    assert "assets    2 files, 2 B" in out


def test_large_file_is_read_by_ranges_and_goes_on_where_it_was_cut(run, tmp_path: Path, naps) -> None:
    held = safetensors_bytes({"x": tensor("F32", 1500, 1500)})

    def page(asked):
        answer = part(asked, held)
        answer.cut = 1_000_000 if asked.span[1] - asked.span[0] > 2_000_000 else None
        return answer

    with site({"/m.safetensors": page}) as server:
        assert run("shard", f"{server.url}/m.safetensors", tmp_path / "d", "--mesh", "dp_shard=2", "-j", "1")[0] == 0
        (tmp_path / "m.safetensors").write_bytes(held)
        assert run("diff", tmp_path / "d", tmp_path / "m.safetensors")[0] == 0
        starts = [asked.span[0] for asked in server.asked if asked.span]
        assert sum(stop - start for start, stop in (a.span for a in server.asked if a.span)) > len(held)
        assert len(starts) == len(set(starts)) + starts.count(0) - 1


@pytest.mark.parametrize(
    ("page", "code", "says"),
    [
        (lambda _: Answer(404), 4, "no such file"),
        (lambda _: Answer(200, {}, HELD), 1, "does not support range requests"),
        (lambda _: Answer(403), 1, "status 403"),
        (lambda _: Answer(302, {"Location": "http://10.0.0.1.nip.io:1/x"}), 1, "cannot reach"),
        (lambda _: Answer(302, {"Location": "http://169.254.169.254/x"}), 1, "private or local"),
        (lambda _: Answer(302, {"Location": "ftp://example.com/x"}), 1, "not followed"),
        (lambda a: part(a, HELD, ETag=f'"{a.number}"' if a.number else '"0"'), 1, "changed"),
        (lambda a: part(a, HELD[: len(HELD) - 8 * a.number]), 1, "changed"),
        (lambda a: part(a, HELD, **{"Last-Modified": str(a.number), "ETag": ""}), 1, "changed"),
    ],
)  # fmt: skip
def test_server_that_cannot_or_lies_is_refused(run, naps, page, code: int, says: str) -> None:
    with site({"/m.safetensors": page}) as server:
        assert says in error_of(run("verify", f"{server.url}/m.safetensors"), code)


def test_server_without_versions_is_told(run, tmp_path: Path) -> None:
    with site({"/m.safetensors": lambda a: part(a, HELD, ETag="")}) as server:
        code, _, err = run("shard", f"{server.url}/m.safetensors", tmp_path / "d", "--mesh", "dp_shard=2")
    assert code == 0
    assert "only sizes are compared" in err


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("https://host.example/", 2),
        ("https://host.example/directory", 2),
        ("https://me:geheim@host.example/m.safetensors", 2),
        ("https://host.example/m.safetensors?X-Amz-Signature=secretsignature", 2),
        ("https:///m.safetensors", 2),
        ("http://127.0.0.1:9/m.safetensors", 1),
        ("http://[::bad/m.safetensors", 2),
        ("https://host.example/%2e%2e", 2),
    ],
)  # fmt: skip
def test_other_addresses_are_refused(run, naps, path: str, code: int) -> None:
    err = error_of(run("inspect", path), code)
    assert "geheim" not in err


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"{}", "weight_map"),
        (b"[" * 10_000, "weight_map"),
        (json.dumps({"weight_map": {"x": "../../x.safetensors"}}).encode(), "outside"),
        (json.dumps({"weight_map": {"x": "http://10.0.0.1/x"}}).encode(), "outside"),
        (json.dumps({"weight_map": {"x": "gone.safetensors"}}).encode(), "no such file"),
    ],
)
def test_bad_index_is_refused(run, index: bytes, says: str) -> None:
    with site({"/model.safetensors.index.json": index}) as server:
        assert says in error_of(run("inspect", f"{server.url}/model.safetensors.index.json"), 4)


def test_adapter_on_a_web_server_is_refused(run) -> None:
    with site({"/adapter_model.safetensors": HELD}) as server:
        err = error_of(run("export-lora", f"{server.url}/adapter_model.safetensors", "out", "--to", "peft"), 2)
    assert "adapter_config.json" in err


@pytest.mark.parametrize(
    ("begins", "leads", "code", "says"),
    [
        ("public.example", "inner.example", 1, "private or local address (inner.example, which is 127.0.0.1)"),
        ("public.example", "xn--nner-0pa.example", 1, "private or local"),
        (
            "public.example",
            "metadata.example",
            1,
            "private or local address (metadata.example, which is 169.254.169.254)",
        ),
        ("public.example", "cdn.example", 0, ""),
        ("inner.example", "127.0.0.1", 0, ""),  # who names an inner host himself may be led within
        ("inner.example", "metadata.example", 1, "private or local"),
    ],
)
def test_redirect_is_judged_by_the_address_that_is_connected_to(run, naps, monkeypatch, begins, leads, code, says):
    """Names answer once for a look and once for a connection; only the second counts, and no byte is sent to it."""
    inside = {"inner.example": "127.0.0.1", "xn--nner-0pa.example": "10.0.0.1", "metadata.example": "169.254.169.254"}
    monkeypatch.setattr(web, "_peers", Peers())
    web._client.cache_clear()
    stream = SyncStream.get_extra_info
    connect, named = socket.create_connection, {}

    def create_connection(address, *args, **options):
        made = connect(("127.0.0.1", address[1]), *args, **options)
        named[made.fileno()] = inside.get(address[0], address[0] if address[0] == "127.0.0.1" else "93.184.216.34")
        return made

    def peer(self, info):
        return (named[self._sock.fileno()], 80) if info == "server_addr" else stream(self, info)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(SyncStream, "get_extra_info", peer)
    with site({"/end.safetensors": HELD}) as server:
        port = server.server_port
        server.pages["/m.safetensors"] = lambda _: Answer(302, {"Location": f"http://{leads}:{port}/end.safetensors"})
        found = run("verify", f"http://{begins}:{port}/m.safetensors")
        assert found[0] == code, found
        assert says in found[2]
        assert ("/end.safetensors" in {asked.path for asked in server.asked}) == (code == 0)
