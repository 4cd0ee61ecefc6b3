"""Attacks through JSON beside the data: the index, and the manifest that ckpt itself writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from corrupt import damage
from corrupt.attacks.recipe import Case, add, attack, harmless

INDEX = "model.safetensors.index.json"


def _index(title: str, tries: str, edit, codes=None, **options) -> None:
    """`edit` changes the document, or gives the bytes in its place."""

    def build(case: Case) -> None:
        path = case.start_from("index") / INDEX
        document = json.loads(path.read_text())
        raw = edit(case, document) if callable(edit) else edit
        path.write_bytes(json.dumps(document).encode() if raw is None else raw)

    add(f"index-{title}", tries, build, codes, mesh_verb="shard", reference="hf", **options)


def _redirect(target: str) -> Callable[[Case, dict], None]:
    def edit(case: Case, document: dict) -> None:
        fqn = next(iter(document["weight_map"]))
        document["weight_map"][fqn] = target.format(secret=case.secret)

    return edit


_index("parent", "a file outside of the directory", _redirect("../../outside/secret.safetensors"), words="outside")
_index("absolute", "an absolute path", _redirect("{secret}"), words="outside")
# fmt: off
_index("inside-out", "a path that leaves through a name inside", _redirect("a/../../../outside/secret.safetensors"),
    words="outside")
_index("dot", "a path with a dot", _redirect("./model-00001-of-00002.safetensors"), words="outside")
_index("nul", "a name with a NUL", _redirect("model\0.safetensors"), words="outside")
_index("empty", "an empty name", _redirect(""), words="outside")
_index("proc", "a file of the process", _redirect("/proc/self/environ"), words="outside")
_index("missing", "a file that is not there, named to drive the terminal", _redirect("\x1b[2J\u202e\n.safetensors"),
    words="missing")
_index("surrogate", "a file name that cannot be encoded", _redirect("\ud800.safetensors"))
_index("long", "a file name of 100 kB", _redirect("x" * 100_000), words="outside")
_index("other-file", "a tensor in another file than it is", _redirect("model-00002-of-00002.safetensors"))
_index("number", "a number for a file", lambda case, document: document["weight_map"].update(x=3))
_index("list", "a list for the map", lambda case, document: document.update(weight_map=[]))
_index("deep", "nested arrays", b"[" * 100_000)
_index("twice", "a key twice", b'{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', words="twice")
_index("nan", "NaN for the total size", b'{"metadata": {"total_size": NaN}, "weight_map": {}}')
_index("number-long", "a total size of a million digits",
    b'{"metadata": {"total_size": ' + b"9" * 10**6 + b'}, "weight_map": {}}')
_index("number-float", "1e999 for the total size: nobody reads it",
    lambda case, document: json.dumps(document).encode()[:-1] + b', "x": 1e999}', harmless())
_index("containers", "three million empty objects", b'{"x": [' + b"{}," * (3 << 20) + b"{}]}",
    words="objects and arrays")
_index("not-utf8", "Latin-1", b'{"weight_map": {"\xe9": "x"}}', words="utf-8")
_index("pickle", "a pickle", b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR.")
_index("extra-tensor", "a tensor that no file has",
    lambda case, document: document["weight_map"].update({"\x1b[31mghost": "model-00001-of-00002.safetensors"}),
    words="no file contains it")
# fmt: on


# The manifest: with a checksum that is right, as whoever changes the data can also make it

VERIFY = {**harmless(), "structure": (3,), "data": (3,)}


def _manifest(title: str, tries: str, edit: Callable[[dict], object], codes=None, **options) -> None:
    def build(case: Case) -> None:
        damage.edit_manifest(case.start_from("dcp"), edit)

    add(f"manifest-{title}", tries, build, codes, reference="hf", **options)


def _first(table: dict) -> dict:
    return next(iter(table.values()))


NO_WAY_BACK = {**harmless(), "structure": (0, 3), "data": (0, 3), "gather": (4,)}
NOT_CARRIED = {**NO_WAY_BACK, "mesh": (4,)}
RECORD = {"nbytes": 22, "digest": "0" * 32}
for title, file in {
    "parent": "../../outside/evil",
    "absolute": "/tmp/evil",
    "dot": "./config.json",
    "empty": "",
    "slashes": "a//b",
    "nul": "a\0b",
    "surrogate": "\ud800",
    "long": "x" * 100_000,
}.items():
    for table in ("assets", "documents"):
        _manifest(
            f"{table}-{title}",
            f"the {table} name {file[:20]!r}, which gather would create",
            lambda d, t=table, f=file: d[t].update({f: RECORD}),
            words="malformed",
        )
    _manifest(
        f"files-{title}", f"the file {file[:20]!r}", lambda d, f=file: d["files"].update({f: 1}), words="malformed"
    )
    if file:
        _manifest(
            f"origin-{title}",
            f"the original header {file[:20]!r}, which gather would write",
            lambda d, f=file: d["origin"]["headers"].update({f + ".safetensors": "{}"}),
            words="malformed",
        )

# fmt: off
_manifest("asset-metadata", "an asset named .metadata", lambda d: d["assets"].update({".metadata": RECORD}),
    NOT_CARRIED)
_manifest("asset-data-file", "an asset named as a data file", lambda d: d["assets"].update({"__0_0.distcp": RECORD}),
    NOT_CARRIED)
_manifest("asset-manifest", "the manifest for an asset", lambda d: d["assets"].update({"ckpt_manifest.json": RECORD}),
    NOT_CARRIED)
_manifest("asset-missing", "an asset that is not there", lambda d: d["assets"].update({"\x1b[2J.json": RECORD}),
    {**VERIFY, "gather": (4,), "mesh": (4,)})
_manifest("asset-huge", "an asset of 2^61 bytes", lambda d: d["assets"]["config.json"].update(nbytes=1 << 61),
    NOT_CARRIED, words="were recorded")
_manifest("asset-beyond", "an asset beyond 2^62 bytes", lambda d: d["assets"]["config.json"].update(nbytes=1 << 63))
_manifest("asset-digest", "another digest for an asset", lambda d: d["assets"]["config.json"].update(digest="0" * 32),
    {**harmless(), "structure": (0,), "data": (0, 3), "gather": (0, 4), "mesh": (0, 4)})
_manifest("document-huge", "a document as long as a whole data file",
    lambda d: d["documents"].update({"__0_0.distcp": {"nbytes": 1 << 60, "digest": "0" * 32}}), VERIFY)
_manifest(
    "origin-shape",
    "headers with other shapes",
    lambda d: d["origin"]["headers"].update(
        {"model.safetensors": _first(d["origin"]["headers"]).replace("[12, 8]", "[8, 12]")}
    ),
    {**harmless(), "structure": (0, 3), "data": (0, 3), "gather": (2, 4)},
)
_manifest("origin-not-json", "headers that are no JSON",
    lambda d: d["origin"]["headers"].update({"model.safetensors": "["}), NO_WAY_BACK)
_manifest("origin-two-files", "one tensor in two original files",
    lambda d: d["origin"]["headers"].update({"other.safetensors": _first(d["origin"]["headers"])}), NO_WAY_BACK)
_manifest("origin-clash", "a header named as a directory of another",
    lambda d: d["origin"]["headers"].update({"model.safetensors/x.safetensors": "{}"}), NO_WAY_BACK, words="directory")
_manifest("origin-script", "a header that would be written as a script",
    lambda d: d["origin"]["headers"].update({"evil.py": "{}"}))
_manifest("origin-index-script", "an index that would be written as a script",
    lambda d: d["origin"].update(index_name="evil.py", index_text="import os"))
_manifest("origin-index-lies", "an index that contradicts the files",
    lambda d: d["origin"].update(index_name=INDEX, index_text='{"weight_map": {"x": "../x"}}'), NO_WAY_BACK)
_manifest("origin-prefix", "a prefix that no name has, and that drives the terminal",
    lambda d: d["origin"].update(prefix="\x1b[2J\u202e"),
    {**harmless(), "structure": (0, 3), "data": (0, 3), "gather": (2, 4)})
_manifest("origin-text-surrogate", "a header that cannot be written",
    lambda d: d["origin"]["headers"].update({"model.safetensors": "\ud800"}), words="malformed")
_manifest("digest-escape", "a digest that drives the terminal",
    lambda d: _first(d["tensors"]).update(digest="\x1b[2J\u202e"), words="malformed")
_manifest("digest-wrong", "another digest", lambda d: _first(d["tensors"]).update(digest="0" * 32),
    {**harmless(), "data": (3,), "gather": (4,), "mesh": (4,)})
_manifest("writer-escape", "a writer that drives the terminal", lambda d: d.update(writer="\x1b[2J\u202e"), harmless())
_manifest("format-escape", "a format that drives the terminal", lambda d: d.update(format="\x1b[2J\u202e"), harmless())
_manifest("mesh-huge", "a mesh of 2^62 ranks", lambda d: d.update(mesh=[["dp_shard", 1 << 62]]), words="malformed")
_manifest("mesh-digits", "a mesh of 10^4000 ranks", lambda d: d.update(mesh=[["dp_shard", 10**4000]]),
    words="malformed")
_manifest("mesh-axis", "an axis that drives the terminal", lambda d: d.update(mesh=[["\x1b[2J", 2]]), words="malformed")
_manifest("mesh-strange", "a mesh that is a number", lambda d: d.update(mesh=3), words="malformed")
_manifest(
    "placement-huge",
    "a placement along dim 10^4000",
    lambda d: _first(d["tensors"]).update(placements={"dp_shard": "S(" + "9" * 4000 + ")"}),
    {
        **harmless(),
        "inspect": (0, 4),
        "structure": (0, 3, 4),
        "data": (0, 3, 4),
        "diff": (0, 3, 4),
        "gather": (0, 4),
        "mesh": (0, 4),
    },
)
_manifest("placement-digits", "a placement of a million digits",
    lambda d: _first(d["tensors"]).update(placements={"dp_shard": "S(" + "9" * 10**6 + ")"}), words="malformed")
_manifest("placements-deep", "nested placements", lambda d: _first(d["tensors"]).update(placements=_nested(900)),
    words="malformed")
_manifest("shape-many", "a shape of 100,000 dims", lambda d: _first(d["tensors"]).update(shape=[1] * 100_000),
    words="malformed")
_manifest("shape-other", "another shape", lambda d: _first(d["tensors"]).update(shape=[8, 12]),
    {**VERIFY, "gather": (4,), "mesh": (4,)})
_manifest("dtype", "a dtype that is a list", lambda d: _first(d["tensors"]).update(dtype=["F32"]), words="malformed")
_manifest("tensor-ghost", "a tensor that is not there, named to drive the terminal",
    lambda d: d["tensors"].update({"\x1b[2J\u202eghost": _first(d["tensors"])}), VERIFY)
_manifest("tensor-nul", "a tensor named as ckpt names assets inside",
    lambda d: d["tensors"].update({"\0asset\0config.json": _first(d["tensors"])}), words="malformed")
_manifest("schema-nested", "a schema version that is deep", lambda d: d.update(schema_version=_nested(900)),
    words="schema version")
_manifest("schema-future", "a newer schema", lambda d: d.update(schema_version=10**4000), words="schema version")
_manifest("digest-kind", "another kind of digest, which drives the terminal", lambda d: d.update(digest="\x1b[2J"),
    words="schema version")
# fmt: on
_manifest("tensors-list", "a list of tensors", lambda d: d.update(tensors=[]), words="malformed")
_manifest("source-list", "a list for the source", lambda d: d.update(source=[1, 2]), words="malformed")
_manifest("assets-number", "a number for an asset", lambda d: d["assets"].update({"config.json": 3}), words="malformed")
_manifest("bytes-bool", "a boolean for a size", lambda d: d["files"].update({"__0_0.distcp": True}), words="malformed")
_manifest("bytes-float", "a float for a size", lambda d: d["files"].update({"__0_0.distcp": 1e300}), words="malformed")
_manifest("file-ghost", "a data file that is not there", lambda d: d["files"].update({"__7_0.distcp": 1}), VERIFY)


def _nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"x": value}
    return value


for title, raw in {
    "empty": b"",
    "edited": b'{"schema_version": 1,\n"checksum": "00"}\n',
    "pickle": b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR.",
    "long-line": b"{" + b" " * (1 << 20),
}.items():

    @attack(f"manifest-{title}", "bytes that are no manifest", words="checksum")
    def _raw(case: Case, raw: bytes = raw) -> None:
        (case.start_from("dcp") / damage.MANIFEST).write_bytes(raw)


@attack("manifest-fifo", "the manifest is a pipe: not a file, so there is none", harmless())
def _fifo(case: Case) -> None:
    path = case.start_from("dcp") / damage.MANIFEST
    path.unlink()
    os.mkfifo(path)


@attack("manifest-link-out", "the manifest is a link to somewhere else", words="leads out")
def _link(case: Case) -> None:
    path = case.start_from("dcp") / damage.MANIFEST
    (case.root / "outside" / "manifest").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to("../../outside/manifest")


@attack("manifest-of-another", "the manifest of another checkpoint", {**VERIFY, "gather": (0, 2, 4), "mesh": (0, 4)})
def _other(case: Case) -> None:
    from corrupt.attacks.opcodes import write_run

    write_run(case.source)
    (case.source / damage.MANIFEST).write_bytes((case.bases["dcp"] / damage.MANIFEST).read_bytes())
