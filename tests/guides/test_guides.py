"""README, the first page and the guides, walked: every command of a page runs in an empty folder with its inputs.

At its head a page says `<!-- inputs: KIND=PATH … -->` (inputs.py); `train=KIND:PATH` is what training leaves.
A block with a language and a name is a file, which is written; `sh` without a name is commands, `text` below it what
the last one prints (`…` stands for anything). Above `sh` may stand `<!-- exit: N -->`, of the last command of ckpt, and
`<!-- not run: WHY -->`: such commands, and all in scripts, units and running text, are read by ckpt's own parser.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import toys
import yaml
from adapters import families
from guides import inputs
from hub.conftest import environment, hub, run, strangers  # noqa: F401
from safetensors.torch import load_file
from seeds.guide import GUIDES

from ckpt_tools.cli.app import _load

DOCS = GUIDES.parent
FRONT = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
PAGES = (FRONT[0], DOCS / "index.md", *sorted(GUIDES.rglob("*.md")))
PAGES = tuple(page for page in PAGES if page.stem not in ("which-page", "fsdp2-cookbook"))
_TRAIN = ("accelerate launch", "torchrun", "bash ", "axolotl train")
_BLOCK = re.compile(r"(?:<!-- (exit|not run): (.*?) -->\n)?^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+\.\d+(e-\d+)?")
_CKPT = f'#!/bin/sh\nexec {sys.executable} -m ckpt_tools "$@"\n'
_SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, and what the comment above it says."""

    language: str
    name: str
    text: str
    exit: int
    not_run: bool

    @property
    def commands(self) -> list[str]:
        """Its lines, with those that a backslash ends joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    """Return the blocks of a page."""
    for said, what, language, name, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(language, name, text, int(what) if said == "exit" else 0, said == "not run")


def parse(command: str) -> None:
    """Let the parser of ckpt's own options read a command."""
    words = shlex.split(command, comments=True)
    at = words.index("ckpt_tools" if "ckpt_tools" in words else "ckpt")
    name, *argv = words[at + 1 :]
    command = _load(name)
    given = command.make_context(name, argv).params
    for param in command.params:
        said, value = param.metavar or "", given.get(param.name)
        if "|" in said and isinstance(value, str) and not re.search("[A-Z]{2}", said):
            choices = said.split("|")
            assert value in choices or ("N" in choices and value.isdigit()), (param.name, value)


def settled(text: str) -> list[str]:
    """The lines of an output, without what another run measures otherwise."""
    return [re.sub(r"\s+", " ", _NUMBER.sub("#", line)).strip().lower() for line in text.splitlines() if line.strip()]


def shows(block: Block, printed: str) -> bool:
    """Does the page show what is printed, in its order?"""
    there = iter(settled(printed))
    for line in settled(block.text):
        start = line.removesuffix("…")
        if start and not any(each == line or (start != line and each.startswith(start)) for each in there):
            return False
    return True


def _files(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.name and (block.language != "python" or "." in block.name)]


class Walk:
    """One page, in the folder that is the current one."""

    def __init__(self, page: Path, call, tools: Path) -> None:
        self.call, self.tools, self.printed = call, tools, ""
        self.trained: inputs.Tensors | None = None
        said = re.search(r"<!-- inputs:(.*?)-->", page.read_text(encoding="utf-8"))
        self.wanted = [each.split("=", 1) for each in said[1].split()] if said else []
        self.train = next((value for kind, value in self.wanted if kind == "train"), None)

    def make_inputs(self) -> None:
        for kind, value in self.wanted:
            if kind in inputs.OF_OTHERS:
                inputs.OF_OTHERS[kind](*value.split(":"))
            elif kind != "train":
                self._make(kind, value)

    def _make(self, kind: str, value: str) -> inputs.Tensors | None:
        Path(value).parent.mkdir(parents=True, exist_ok=True)
        return inputs.KINDS[kind](Path(value))

    def take(self, block: Block) -> None:
        """Run the commands of a block."""
        last = max((i for i, line in enumerate(block.commands) if line.startswith("ckpt ")), default=-1)
        for number, line in enumerate(block.commands):
            code = self.one(line)
            assert code == (block.exit if number == last else 0), (line, code, self.printed)

    def one(self, line: str) -> int:
        if self.train and line.startswith(_TRAIN):
            self.trained = self._make(*self.train.split(":"))
            return 0
        if not line.startswith("ckpt "):
            env = os.environ | {"PATH": f"{self.tools}:{os.environ['PATH']}"}
            done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=False)
            self.printed = done.stdout + done.stderr
            return done.returncode
        argv = shlex.split(line, comments=True)[1:]
        if self.train and argv[0] in ("smoke", "estimate"):  # their own pages run them
            parse(line)
            return 0
        if self.train and argv[0] == "preflight":
            argv = self._rules_only(argv)
        code, out, err = self.call(*argv)
        self.printed = out + err
        return code

    @staticmethod
    def _rules_only(argv: list[str]) -> list[str]:
        if "--model" in argv:  # building it takes most of the time
            del argv[argv.index("--model") : argv.index("--model") + 2]
        return [*argv, "--only", "rules"]


@pytest.fixture(scope="session")
def tools(tmp_path_factory) -> Path:
    """ckpt, and what a cluster has, as programs."""
    directory = tmp_path_factory.mktemp("tools")
    for name, text in {"ckpt": _CKPT, "srun": _SRUN, "scontrol": "#!/bin/sh\necho here\n"}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def published(hub, walk: Walk) -> dict[str, torch.Tensor]:  # noqa: F811
    """What a stranger does with every repository that the page pushed → what must come out."""
    jobs = {}
    for repo in hub.repos:
        files = hub.files(repo)
        card = files.get("README.md", b"").decode()
        if "adapter_config.json" in files:
            block = re.findall(r"```python\n(from peft .*?)```", card, re.DOTALL)[0]
            jobs[f"card:guide:{block}"] = inputs.lora_outputs()
        elif line := re.search(r"^pipeline\.load_lora_weights.*$", card, re.MULTILINE):
            jobs[f"image:flux2:{line[0]}"] = inputs.image_outputs(
                Path("output/my_style/my_style_000000500.safetensors")
            )
        elif walk.trained is not None and repo != "org/base":
            model = toys.build("llama")
            model.load_state_dict(walk.trained)
            jobs[f"auto:guide:{repo}"] = families.outputs(model, "llama")
    return jobs


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS.parent).with_suffix("").as_posix())
def test_every_command_of_a_page_runs(page, tmp_path, monkeypatch, run, hub, environment, tools):  # noqa: F811
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.syspath_prepend(".")
    walk = Walk(page, run, tools)
    walk.make_inputs()
    if Path("base").is_dir():
        hub.make("org/base", {path.name: path.read_bytes() for path in Path("base").iterdir()})
    for file in _files(page):
        Path(file.name).write_text(file.text)
    is_below = False
    for block in blocks(page):
        if block.language == "sh" and not block.name:
            is_below = not block.not_run
            walk.take(block) if is_below else [parse(line) for line in block.commands if "ckpt" in line.split()]
        elif block.language == "text" and not block.name and is_below:
            assert shows(block, walk.printed), walk.printed
            is_below = False
    if walk.trained is not None and Path("out").exists():
        back = load_file("out/model.safetensors")
        assert back.keys() == walk.trained.keys()
        assert [name for name, tensor in walk.trained.items() if not torch.equal(back[name], tensor)] == []
    jobs = published(hub, walk)
    pushes = re.search(r"^ckpt push (?!.*--dry-run)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert bool(jobs) == (pushes is not None and page.stem != "openrlhf")  # another toy
    for job, seen in strangers(environment, tmp_path, *jobs, is_owner=True).items() if jobs else ():
        torch.testing.assert_close(seen, jobs[job], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", [*FRONT, *sorted(GUIDES.rglob("*.md"))], ids=lambda page: page.stem)
def test_every_command_in_running_text_is_one(page):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for command in re.findall(r"`(ckpt [a-z-]+ [^`]*)`", text):
        if "…" not in command:
            parse(command)


def _commands_of(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, str) and node.startswith("ckpt "):
        yield node
    elif isinstance(node, list) and node[:1] == ["ckpt"] and all(isinstance(each, str) for each in node):
        yield shlex.join(node)
    elif isinstance(node, list):
        for each in node:
            yield from _commands_of(each)


def test_every_script_and_job_is_one(tmp_path):
    seen = set()
    for block in (block for page in PAGES for block in _files(page)):
        seen.add(Path(block.name).suffix)
        if block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        if block.language == "yaml":
            commands = list(_commands_of(yaml.safe_load(block.text)))
        else:
            commands = (
                re.findall(r"\bckpt (?:[a-z-]+ [^#|\n]*)", block.text)
                if block.language in ("sh", "ini", "cron")
                else []
            )
        for command in commands:
            parse(command)
        if block.language == "cron":
            assert re.fullmatch(r"(\S+ ){5}\S+/ckpt .*", block.commands[0])
        if block.language == "ini" and shutil.which("systemd-analyze"):
            (tmp_path / block.name).write_text(block.text.replace("/opt/train/bin/ckpt", "/bin/true"))
            done = subprocess.run(["systemd-analyze", "verify", tmp_path / block.name], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
    assert {".sh", ".yaml", ".yml", ".service", ".cron", ".toml", ".txt"} <= seen


@pytest.mark.full
def test_job_ends_on_a_node_without_gpus(tmp_path, monkeypatch, tools):
    """srun runs its command here, and there is no GPU: the training is not started."""
    script = next(block for block in _files(GUIDES / "cluster.md") if block.name == "job.sh")
    monkeypatch.chdir(tmp_path)
    inputs.leave_file("trainers/axolotl", "sft.yaml")
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here"}
    done = subprocess.run(["bash", "-c", script.text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 3
    assert "host-gpus" in done.stdout
    assert "torchrun" not in done.stderr
