r"""The commands of a shell script as lists of words, with what the script itself says of its variables.

Nothing is executed. A variable becomes its value where that is certain: it was assigned unconditionally before
(`X=a`, `export X=a`, `A=(a b)`, `A+=(c)`, `read -r X <<EOF`), in a function that is called, in a file that is read in
(`source`), by Slurm (`#SBATCH --nodes=2`), or a default stands beside it (`${X:-a}`) and the script does not assign it.
Anything else stays what is written: `$X`, `$(date)`, `$@`.

Source: POSIX Shell Command Language, 2.6 (word expansions), 2.9 (commands) and 2.14 (`.`, `export`, `return`, `set`,
`shift`); bash for arrays, `local` and `source`; sbatch(1) for its options and the variables that they set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from ckpt_tools.preflight.configs.shell import (
    PREFIXES,
    Function,
    Recording,
    Token,
    assigned_in,
    is_assignment,
    literal,
    tokenize,
)
from ckpt_tools.preflight.configs.variables import Variables

# What a Slurm job knows of itself: the variables that its `#SBATCH` lines make
# Source: sbatch(1), "Options" and "Output environment variables".

_SBATCH = re.compile(r"^#SBATCH[ \t]+(?P<words>[^\n]*)", re.MULTILINE)
_SLURM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""Option of sbatch → the variables that a job has of it."""


def slurm_variables(text: str) -> dict[str, str]:
    """Return what `#SBATCH` lines make Slurm set, as far as they say a plain number."""
    found: dict[str, str] = {}
    for line in _SBATCH.finditer(text):
        words = line["words"].partition(" #")[0].replace("=", " ").split()
        for name, value in pairwise(words):
            if name.startswith("-") and name.lstrip("-") in _SLURM:
                number = value.rpartition(":")[2]  # gpu:8, gpu:h100:8
                if number.isdecimal():
                    found |= dict.fromkeys(_SLURM[name.lstrip("-")], number)
    tasks, nodes = found.get("SLURM_NTASKS_PER_NODE"), found.get("SLURM_NNODES")
    if tasks and nodes and "SLURM_NTASKS" not in found:
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(tasks[:6]) * int(nodes[:6]))
    return found


_NAME = re.compile(r"[A-Za-z_]\w*")
_OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_BEFORE_COMMANDS = _OPENING | PREFIXES | {"function"}
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASSIGNING = frozenset({"read", "mapfile", "readarray", "getopts", "printf", "unset", "let"})
_SHELLS = ("bash", "sh", "zsh")
_SETS_NO_OPTIONS = ("activate", ".bashrc", ".bash_profile", ".profile", "conda.sh")
"""Files that set up a shell: they are taken to leave the script's own variables alone."""
_MAX_DEPTH = 200  # compounds and functions inside one another
_MAX_CALLS = 16  # functions and files inside one another
_CALL_COST = 64
"""Characters that a token of a function costs, each time that it is called: a dozen lines can call one a million times.
"""

OpenFile = Callable[[str], tuple[str, str] | None]  # Name of a file in a script → its path and text, if it is here


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script as far as it can be read without running it."""

    commands: tuple[tuple[str, ...], ...] = ()
    assumed: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    written: Mapping[str, str | None] = field(default_factory=dict)
    takes_arguments: bool = False
    num_tasks: int | None = None


def read_script(
    text: str, *, path: str | None = None, open_file: OpenFile | None = None, arguments: tuple[str, ...] | None = None
) -> Script:
    """Return a script's commands, or raise ValueError; `open_file` opens what it reads, `arguments` are `$@`."""
    shell = _Shell(open_file=open_file or (lambda _: None))
    shell.known.path, shell.known.arguments = path, arguments
    slurm = slurm_variables(text)
    shell.known.values |= slurm
    shell.known.exported |= slurm.keys()
    try:
        shell.run(tokenize(text))
        shell.run_uncalled()
    except RecursionError:
        raise ValueError("expansions nested too deeply") from None
    return Script(
        commands=tuple(shell.commands),
        assumed=tuple(shell.known.assumed),
        files=tuple(shell.files),
        absent=tuple(shell.missing),
        written=shell.written,
        takes_arguments=shell.known.takes_arguments,
        num_tasks=int(slurm["SLURM_NTASKS"][:9]) if "SLURM_NTASKS" in slurm else None,
    )


@dataclass(slots=True)
class _Shell:
    """What is known after each token."""

    open_file: OpenFile
    known: Variables = field(init=False)
    commands: list[tuple[str, ...]] = field(default_factory=list)
    files: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    recording: Recording | None = None
    stack: list[str] = field(default_factory=list)
    """Compounds that are open: if, for, {, (; call: what is called may not be."""
    pending: list[Token] = field(default_factory=list)
    is_conditional: bool = False  # After && or ||, or in a pipe: it may not run, or not in this shell
    frame: int = 0  # Compounds that were open when the function, or the file, began
    over: str = ""
    targets: tuple[str, ...] = ()
    appends: bool = False
    last: tuple[str, ...] = ()
    last_targets: tuple[str, ...] = ()
    num_calls: int = 0

    def __post_init__(self) -> None:
        """Begin where nothing is known."""
        self.known = Variables(is_certain=lambda: self.is_certain)

    @property
    def is_certain(self) -> bool:
        """Is this point reached on every way through the script?"""
        return not self.stack and not self.is_conditional

    def run(self, tokens: Iterable[Token]) -> None:
        """Take tokens up to the end, or to an `exit` that is certain."""
        for token in tokens:
            self.take(token)
            if self.over:
                return

    def run_uncalled(self) -> None:
        """Read the functions that nothing calls: what they run may be the run, and nothing in them is known."""
        stack, frame, was_uncalled = self.stack, self.frame, self.known.is_uncalled
        for one in list(self.functions.values()):
            if not one.was_called:
                self.stack, self.frame, self.pending, self.over, self.is_conditional = ["function"], 1, [], "", False
                self.known.is_uncalled = True
                self.run([*one.tokens, Token(kind="newline")])
        self.stack, self.frame, self.over, self.known.is_uncalled = stack, frame, "", was_uncalled

    def take(self, token: Token) -> None:
        """Take the next token."""
        if len(self.stack) > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} compound commands inside one another")
        if (recording := self.recording) is not None:
            self._record(recording, token)
        elif token.kind in ("word", "array"):
            self.pending.append(token)
        elif token.kind == "redirection":
            if token.text.lstrip("1&").startswith(">") and not token.text.endswith("&"):
                self.targets = (*self.targets, self.known.text(token.word) or "")
                self.appends = ">>" in token.text
        elif token.kind == "heredoc":
            if self.pending:
                self._end_command()
            self._take_document(self.known.text(token.word))
        elif token.text == "(":
            self._open_bracket()
        elif token.text == ")":
            if self.stack[-1:] == ["case"]:
                self.pending = []  # a pattern
                return
            self._end_command()
            if self.stack and self.stack[-1] == "(":
                self.stack.pop()
        elif token.kind == "newline" and not self.pending:
            self.targets = ()
            return  # && and | go on in the next line
        else:
            self.is_conditional |= token.text in ("|", "|&", "&")
            self._end_command()
            self.is_conditional = token.text in ("&&", "||", "|", "|&")
            if self.recording is not None:  # `function f { a; b`
                self._record(self.recording, token)

    def _open_bracket(self) -> None:
        """Begin a function, whose name was the last word, or a subshell."""
        names = [literal(token) for token in self.pending]
        if names and names[-1] not in (None, *_BEFORE_COMMANDS) and all(one in _BEFORE_COMMANDS for one in names[:-1]):
            del self.pending[-1]
            self._end_command()
            self.recording = Recording(names[-1] or "")
        else:
            self._end_command()
            self.stack.append("(")

    def _record(self, recording: Recording, token: Token) -> None:
        if recording.take(token):
            self.recording = None
            self.functions[recording.name] = Function(recording.tokens, self.is_certain)

    def _end_command(self) -> None:
        pending, self.pending = self.pending, []
        targets, self.targets = self.targets, ()
        while pending and (word := literal(pending[0])) is not None:
            if word == "function":
                if len(pending) < 2:
                    return  # `function f()`: a bracket follows
                self.recording = Recording(literal(pending[1]) or "")
                for token in pending[2:]:  # a brace in the same line
                    self._record(self.recording, token)
                return
            if word in _OPENING:
                self.stack.append(word)
                pending = pending[1:]
                if word in ("for", "select"):
                    self.known.forget(literal(item) for item in pending[:1])
                    return
                if word == "case":
                    return
            elif word in _CLOSING:
                if len(self.stack) > self.frame:
                    self.stack.pop()
                pending = pending[1:]
            elif word in PREFIXES:
                pending = pending[1:]
            else:
                break
        if pending:
            self._run(pending, targets)

    def _run(self, pending: list[Token], targets: tuple[str, ...]) -> None:
        name = literal(pending[0])
        if name in _DECLARING or all(is_assignment(token) for token in pending):
            for token in pending:
                self.known.assign(token, declared_by=name or "")
            return
        alone = []
        while pending and is_assignment(pending[0]):
            alone.append(pending[0])  # they count for this command alone
            pending = pending[1:]
        words = tuple(chain.from_iterable(self.known.expand(token.word) for token in pending))
        self.last, self.last_targets = words, targets
        if not words:
            return
        self.written |= dict.fromkeys(targets)
        if words[0] in self.functions:
            self._call(self.functions[words[0]], words)
            return
        if not self._start_shell(words, alone):
            self.commands.append(words)
        self._take_effect(words)

    def _take_effect(self, words: tuple[str, ...]) -> None:
        """Change what is known as a command changes it."""
        name = words[0]
        if name in _ASSIGNING:
            self.known.forget(words[1:])
        elif name == "eval":
            self.known.forget_all()
        elif name in ("source", "."):
            if not words[-1].endswith(_SETS_NO_OPTIONS):
                self._source(words)
        elif name in ("return", "exit"):
            if self.known.is_uncalled:
                pass  # nobody calls it
            elif len(self.stack) == self.frame and not self.is_conditional:
                self.over = str(name)
            elif name == "return":
                self.stack.insert(self.frame, "call")  # whatever follows may not run
        elif (name == "set" and "--" in words) or name == "shift":
            is_certain = len(self.stack) == self.frame and not self.is_conditional
            if name == "shift" and self.known.arguments is None and is_certain:
                return  # of no arguments
            self.known.takes_arguments |= not self.known.has_other_arguments
            self.known.has_other_arguments = True
            number = int(words[1][:3]) if len(words) > 1 and words[1].isdecimal() else 1
            shifted = self.known.shifted(number)
            self.known.arguments = (
                None if not is_certain else shifted if name == "shift" else words[words.index("--") + 1 :]
            )
        elif self.stack[-2:] == ["(", "("]:
            self.known.forget(_NAME.findall(" ".join(words)))  # (( i++ ))
        elif "$" in name:
            self.known.forget(assigned_in(self.functions.values()))  # it may be one of them
        elif name in ("sed", "perl", "envsubst"):
            self.written |= dict.fromkeys(word for word in words if word in self.written)

    def _call(self, function: Function, words: tuple[str, ...]) -> None:
        if self.num_calls >= _MAX_CALLS:
            self.known.forget_all()  # it calls itself
            return
        function.was_called = True
        self.known.shadowed.append({})
        has_braces = literal(function.tokens[0]) == "{"  # what brackets hold changes nothing outside
        tokens = function.tokens[1:-1] if has_braces else function.tokens
        self._inside(tokens, words[1:], is_certain=function.is_certain)
        self.known.values |= self.known.shadowed.pop()

    def _inside(self, tokens: Sequence[Token], arguments: tuple[str, ...] | None, *, is_certain: bool = True) -> None:
        """Take the tokens of a function or a file, and come back."""
        self.known.spend(_CALL_COST * len(tokens))
        before = (
            self.known.arguments,
            self.known.has_other_arguments,
            self.frame,
            self.is_conditional,
            len(self.stack),
        )
        self.num_calls += 1
        if self.is_conditional or not is_certain:
            self.stack.append("call")
        self.frame, self.is_conditional = len(self.stack), False
        if arguments is not None:
            self.known.arguments, self.known.has_other_arguments = arguments, True
        if any("$@" in word or "$*" in word or word.endswith(" of set") for word in arguments or ()):
            self.known.arguments = None
        self.run([*tokens, Token(kind="newline")])
        self.num_calls -= 1
        self.over = "" if self.over == "return" else self.over
        self.pending, self.recording = [], None
        self.known.arguments, self.known.has_other_arguments, self.frame, self.is_conditional, depth = before
        del self.stack[depth:]

    def _source(self, words: tuple[str, ...]) -> None:
        """Read a file in, as `source` does; one that is not here may set anything."""
        found = self._open(words[1]) if len(words) > 1 and self.num_calls < _MAX_CALLS else None
        if found is None:
            self.known.forget_all()
            return
        path, self.known.path = self.known.path, found[0]
        self._inside(list(tokenize(found[1])), tuple(words[2:]) or None)
        self.known.path = path

    def _start_shell(self, words: tuple[str, ...], alone: list[Token]) -> bool:
        """Read what a command runs in a shell of its own, `bash -c TEXT` or a script that is here; False: nothing."""
        at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), None)
        rest = words if at is None else words[at + 1 :]
        flags = [word for word in rest if word.startswith("-")]
        text, line, path, arguments = None, 1, self.known.path, words[:0]
        if at is not None and rest and flags[:1] == list(rest[:1]) and rest[0].endswith("c") and len(rest) > 1:
            text, line = rest[1], getattr(getattr(rest[1], "place", None), "line", 1)
        elif rest and rest[0].endswith((".sh", ".bash")) and (at is not None or rest[0].startswith((".", "/"))):
            found = None if self.num_calls >= _MAX_CALLS else self._open(rest[0])
            if found is not None:
                (path, text), arguments = found, rest[1:]
        if text is None:
            return False
        kept, place = (self.known.values, self.known.path, self.known.exported, self.functions), len(self.commands)
        self.known.values = {name: value for name, value in self.known.values.items() if name in self.known.exported}
        self.known.exported, self.functions, self.known.path = set(self.known.exported), {}, path
        for token in alone:
            self.known.assign(token, declared_by="export")
        self._inside(list(tokenize(text, line)), arguments)
        self.over = ""
        if not self.known.is_uncalled:
            self.run_uncalled()
        self.known.values, self.known.path, self.known.exported, self.functions = kept
        prefix = words[: at or 0]  # srun and its options
        self.commands[place:] = [(*prefix, *command) for command in self.commands[place:]]
        return True

    def _open(self, name: str) -> tuple[str, str] | None:
        if "$" in name or "`" in name:
            return None
        found = self.open_file(name)
        if found is None:
            self.missing[name] = None
        else:
            self.files[found[0]] = None
        return found

    def _take_document(self, text: str | None) -> None:
        """Give a here-document to the last command: `read`, or one that writes it into a file."""
        words = self.last
        if words[:1] == ("cat",) and len(words) == 1 and len(self.last_targets) == 1:
            self.written[self.last_targets[0]] = text if self.is_certain and not self.appends else None
        elif words[:1] == ("tee",) and len(words) == 2:
            self.written[words[1]] = None if self.stack else text
        elif words[:1] == ("read",) and _NAME.fullmatch(words[-1]) and self.is_certain:
            # With `-r` and `-d ''` it reads everything.
            reads_all = any(one.startswith("-") and one.endswith("d") and not value for one, value in pairwise(words))
            is_raw = any(one.startswith("-") and "r" in one for one in words)
            if text is not None and reads_all and (is_raw or "\\" not in text):
                self.known.values[words[-1]] = text.strip()
