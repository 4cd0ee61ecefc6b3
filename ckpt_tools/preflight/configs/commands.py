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
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from ckpt_tools.preflight.configs.expansions import Value, expanded, place_of_script
from ckpt_tools.preflight.configs.shell import Token, Word, pieces_of, tokenize
from ckpt_tools.preflight.places import Place, PlacedText

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<rest>\[[^]]*\])?(?P<plus>\+?)=")
_DEFAULT = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*|[1-9])(?P<how>:?[-=+])(?P<default>.*)\}", re.DOTALL)
_ARGUMENT = re.compile(r"\$(?:\{?(?P<number>[1-9])\}?|\{?(?P<all>[@*])\}?|\{?(?P<count>#)\}?)")
_OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time"})
_BEFORE_COMMANDS = _OPENING | _PREFIXES | {"function"}
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASSIGNING = frozenset({"read", "mapfile", "readarray", "getopts", "printf", "unset", "let"})
_SHELLS = ("bash", "sh", "zsh")
_SETS_NO_OPTIONS = ("activate", ".bashrc", ".bash_profile", ".profile", "conda.sh")
"""Files that set up a shell: they are taken to leave the script's own variables alone."""
_MAX_EXPANDED = 4 << 20
"""Characters of all words and values once variables are known: ten lines can double one twenty times."""
_MAX_DEPTH = 200
"""Compounds and functions inside one another."""
_MAX_CALLS = 16
"""Functions and files inside one another."""

OpenFile = Callable[[str], tuple[str, str] | None]
"""Name of a file in a script → its path and text, if it is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script as far as it can be read without running it."""

    commands: tuple[tuple[str, ...], ...]
    """Words, each a `PlacedText`."""
    assumed: tuple[str, ...] = ()
    """Variables whose default was taken: the environment is assumed not to set them."""
    files: tuple[str, ...] = ()
    """Other scripts that it starts or reads in, and that were read."""
    missing: tuple[str, ...] = ()
    """Those that are not here."""
    written: Mapping[str, str | None] = field(default_factory=dict)
    """Files that it writes itself → their text; None where that is not certain."""
    takes_arguments: bool = False
    """Does it look at what it is started with?"""
    num_tasks: int | None = None
    """What its `#SBATCH` lines make Slurm start."""


def read_script(
    text: str,
    *,
    path: str | None = None,
    open_file: OpenFile | None = None,
    arguments: tuple[str, ...] | None = None,
) -> Script:
    """Return the commands of a script.

    Args:
        text: The script.
        path: Where it lies; None for text that lies nowhere.
        open_file: Opens the files that it reads in; None: there are none.
        arguments: What it is started with; None where nobody says: `$@` is taken for nothing, `$1` is not known.

    Raises:
        ValueError: Something is never closed, or there is more than any script has.
    """
    shell = _Shell(path=path, open_file=open_file or (lambda _: None), arguments=arguments)
    slurm = slurm_variables(text)
    shell.values |= slurm
    shell.exported |= slurm.keys()
    try:
        shell.run(tokenize(text))
        shell.run_uncalled()
    except RecursionError:
        raise ValueError("expansions nested too deep") from None
    return Script(
        commands=tuple(shell.commands),
        assumed=tuple(shell.assumed),
        files=tuple(shell.files),
        missing=tuple(shell.missing),
        written=shell.written,
        takes_arguments=shell.takes_arguments,
        num_tasks=int(slurm["SLURM_NTASKS"][:9]) if "SLURM_NTASKS" in slurm else None,
    )


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


@dataclass(slots=True)
class _Function:
    tokens: list[Token] = field(default_factory=list)
    is_certain: bool = True
    """Is it defined on every way through the script?"""
    was_called: bool = False


@dataclass(slots=True)
class _Recording:
    """The body of a function, while it is read."""

    name: str
    tokens: list[Token] = field(default_factory=list)
    opening: str = ""
    depth: int = 0
    is_start: bool = True
    """Does a command begin here?"""

    def take(self, token: Token) -> bool:
        """Take a token; True at the end of the body."""
        word = _literal(token) if token.kind == "word" else token.text if token.kind == "operator" else None
        if not self.opening:
            if token.kind == "newline" or word == ")":
                return False
            if word not in ("{", "("):
                raise ValueError(f"the function {self.name} has no braces")
            self.opening = word
        if self.opening == "(" and word == "case":
            raise ValueError(f"a case in the subshell {self.name}")
        counts = self.is_start or self.opening == "("
        closing = "}" if self.opening == "{" else ")"
        self.depth += (counts and word == self.opening) - (counts and word == closing)
        self.is_start = token.kind != "word" or word in _PREFIXES or word in ("{", "}", "if", "while", "until")
        self.tokens.append(token)
        return self.depth == 0


@dataclass(slots=True)
class _Shell:
    """What is known after each token."""

    path: str | None
    """Of the script, or of the file that it reads in."""
    open_file: OpenFile
    commands: list[tuple[str, ...]] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, _Function] = field(default_factory=dict)
    recording: _Recording | None = None
    stack: list[str] = field(default_factory=list)
    """Compounds that are open: if, for, {, (; call: what is called may not be."""
    pending: list[Token] = field(default_factory=list)
    is_conditional: bool = False
    """After && or ||, or in a pipe: it may not run, or not in this shell."""
    is_sourced: bool = False
    """Another file was read in before, which may have set anything."""
    arguments: tuple[str, ...] | None = None
    """`$@`, where it is known."""
    takes_arguments: bool = False
    has_other_arguments: bool = False
    """`$@` is not what the script was called with: in a function, after `set -- …`."""
    shadowed: list[dict[str, Value]] = field(default_factory=list)
    """For each function that is being called, what its `local` variables were before."""
    frame: int = 0
    """Compounds that were open when the function, or the file, began."""
    over: str = ""
    """What ended it: return, exit."""
    targets: tuple[str, ...] = ()
    """Files that the command writes to."""
    last: tuple[str, ...] = ()
    """The words of the last command: a here-document is its input."""
    last_targets: tuple[str, ...] = ()
    num_calls: int = 0
    num_chars: int = 0

    def run(self, tokens: Iterable[Token]) -> None:
        """Take tokens up to the end, or to an `exit` that is certain."""
        for token in tokens:
            self.take(token)
            if self.over:
                return

    def run_uncalled(self) -> None:
        """Read the functions that nothing calls: what they run may be the run, and nothing in them is known."""
        stack, frame = self.stack, self.frame
        for one in list(self.functions.values()):
            if not one.was_called:
                self.stack, self.frame, self.pending, self.over, self.is_conditional = ["function"], 1, [], "", False
                self.run([*one.tokens, Token(kind="newline")])
        self.stack, self.frame, self.over = stack, frame, ""

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
                self.targets = (*self.targets, self._text(token.word) or "")
        elif token.kind == "heredoc":
            if self.pending:
                self._end_command()
            self._take_document(self._text(token.word))
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
            self.is_conditional |= token.text in ("|", "|&")
            self._end_command()
            self.is_conditional = token.text in ("&&", "||", "|", "|&")
            if self.recording is not None:  # `function f { a; b`
                self._record(self.recording, token)

    def _open_bracket(self) -> None:
        """Begin a function, whose name was the last word, or a subshell."""
        names = [_literal(token) for token in self.pending]
        if names and names[-1] not in (None, *_BEFORE_COMMANDS) and all(one in _BEFORE_COMMANDS for one in names[:-1]):
            del self.pending[-1]
            self._end_command()
            self.recording = _Recording(names[-1] or "")
        else:
            self._end_command()
            self.stack.append("(")

    def _record(self, recording: _Recording, token: Token) -> None:
        if recording.take(token):
            self.recording = None
            is_certain = not self.stack and not self.is_conditional
            self.functions[recording.name] = _Function(recording.tokens, is_certain)

    def _end_command(self) -> None:
        pending, self.pending = self.pending, []
        targets, self.targets = self.targets, ()
        while pending and (word := _literal(pending[0])) is not None:
            if word == "function":
                if len(pending) < 2:
                    return  # `function f()`: a bracket follows
                self.recording = _Recording(_literal(pending[1]) or "")
                for token in pending[2:]:  # a brace in the same line
                    self._record(self.recording, token)
                return
            if word in _OPENING:
                self.stack.append(word)
                pending = pending[1:]
                if word in ("for", "select"):
                    self._forget(_literal(item) for item in pending[:1])
                    return
                if word == "case":
                    return
            elif word in _CLOSING:
                if len(self.stack) > self.frame:
                    self.stack.pop()
                pending = pending[1:]
            elif word in _PREFIXES:
                pending = pending[1:]
            else:
                break
        if pending:
            self._run(pending, targets)

    def _run(self, pending: list[Token], targets: tuple[str, ...]) -> None:
        name = _literal(pending[0])
        if name in _DECLARING or all(_is_assignment(token) for token in pending):
            for token in pending:
                self._assign(token, declared_by=name or "")
            return
        alone = []
        while pending and _is_assignment(pending[0]):
            alone.append(pending[0])  # they count for this command alone
            pending = pending[1:]
        words = tuple(chain.from_iterable(self._expand(token.word) for token in pending))
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
            self._forget(words[1:])
        elif name == "eval":
            self._forget_all()
        elif name in ("source", "."):
            if not words[-1].endswith(_SETS_NO_OPTIONS):
                self._source(words)
        elif name in ("return", "exit"):
            if self._in_function:
                pass  # nobody calls it
            elif len(self.stack) == self.frame and not self.is_conditional:
                self.over = str(name)
            elif name == "return":
                self.stack.insert(self.frame, "call")  # whatever follows may not run
        elif (name == "set" and "--" in words) or name == "shift":
            is_certain = len(self.stack) == self.frame and not self.is_conditional
            if name == "shift" and self.arguments is None and is_certain:
                return  # of no arguments
            self.takes_arguments |= not self.has_other_arguments
            self.has_other_arguments = True
            number = int(words[1][:3]) if len(words) > 1 and words[1].isdecimal() else 1
            shifted = None if self.arguments is None else self.arguments[number:]
            self.arguments = None if not is_certain else shifted if name == "shift" else words[words.index("--") + 1 :]
        elif self.stack[-2:] == ["(", "("]:
            self._forget(_NAME.findall(" ".join(words)))  # (( i++ ))
        elif "$" in name:
            self._forget(_assigned_in(self.functions.values()))  # it may be one of them
        elif name in ("sed", "perl", "envsubst"):
            self.written |= dict.fromkeys(word for word in words if word in self.written)

    def _call(self, function: _Function, words: tuple[str, ...]) -> None:
        if function.tokens and self.num_calls >= _MAX_CALLS:
            self._forget_all()  # it calls itself
            return
        function.was_called = True
        self.shadowed.append({})
        self._inside(function.tokens[1:-1], words[1:], is_certain=function.is_certain)
        self.values |= self.shadowed.pop()

    def _inside(self, tokens: Sequence[Token], arguments: tuple[str, ...] | None, *, is_certain: bool = True) -> None:
        """Take the tokens of a function or a file, and come back."""
        self._spend(len(tokens))
        before = (self.arguments, self.has_other_arguments, self.frame, self.is_conditional, len(self.stack))
        self.num_calls += 1
        if self.is_conditional or not is_certain:
            self.stack.append("call")
        self.frame, self.is_conditional = len(self.stack), False
        if arguments is not None:
            self.arguments, self.has_other_arguments = arguments, True
        if any("$@" in word or "$*" in word or word.endswith(" of set") for word in arguments or ()):
            self.arguments = None
        self.run([*tokens, Token(kind="newline")])
        self.num_calls -= 1
        self.over = "" if self.over == "return" else self.over
        self.pending, self.recording = [], None
        self.arguments, self.has_other_arguments, self.frame, self.is_conditional, depth = before
        del self.stack[depth:]

    def _source(self, words: tuple[str, ...]) -> None:
        """Read a file in, as `source` does; one that is not here may set anything."""
        found = self._open(words[1]) if len(words) > 1 else None
        if found is None:
            self._forget_all()
            return
        path, self.path = self.path, found[0]
        self._inside(list(tokenize(found[1])), tuple(words[2:]) or None)
        self.path = path

    def _start_shell(self, words: tuple[str, ...], alone: list[Token]) -> bool:
        """Read what a command runs in a shell of its own, `bash -c TEXT` or a script that is here; False: nothing."""
        at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), None)
        rest = words if at is None else words[at + 1 :]
        flags = [word for word in rest if word.startswith("-")]
        text, line, path, arguments = None, 1, self.path, words[:0]
        if at is not None and rest and flags[:1] == list(rest[:1]) and rest[0].endswith("c") and len(rest) > 1:
            text, line = rest[1], getattr(getattr(rest[1], "place", None), "line", 1)
        elif rest and rest[0].endswith((".sh", ".bash")) and (at is not None or rest[0].startswith((".", "/"))):
            found = None if self.num_calls >= _MAX_CALLS else self._open(rest[0])
            if found is not None:
                (path, text), arguments = found, rest[1:]
        if text is None:
            return False
        kept, place = (self.values, self.path, self.exported, self.functions), len(self.commands)
        self.values = {name: value for name, value in self.values.items() if name in self.exported}
        self.exported, self.functions, self.path = set(self.exported), {}, path
        for token in alone:
            self._assign(token, declared_by="export")
        self._inside(list(tokenize(text, line)), arguments)
        self.over = ""
        if not self._in_function:
            self.run_uncalled()
        self.values, self.path, self.exported, self.functions = kept
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

    def _assign(self, token: Token, *, declared_by: str = "") -> None:
        value: Value
        if token.kind == "array":
            name, appends, index = token.text, token.appends, None
            has_keys = any(item and item[0].text.startswith("[") and not item[0].is_quoted for item in token.items)
            value = None if has_keys else tuple(chain.from_iterable(self._expand(item) for item in token.items))
        else:
            found = None if not token.word else _ASSIGNMENT.match(token.word[0].text)
            if found is None:
                self.exported |= {text} if declared_by == "export" and (text := _literal(token)) else set()
                return  # `export X`, an option of declare
            name, appends, index = found["name"], bool(found["plus"]), found["rest"]
            first = token.word[0]
            value = self._text((replace(first, text=first.text[found.end() :]), *token.word[1:]))
        if appends:
            value = _joined(self.values.get(name), value)
        self._spend(sum(map(len, value)) if isinstance(value, tuple) else len(value or ""))
        if self.stack or self.is_conditional or index is not None:
            value = None
        if self._in_function:
            return  # nobody calls it
        if self.shadowed and declared_by in ("local", "declare", "typeset"):
            self.shadowed[-1].setdefault(name, self.values.get(name))
        self.exported |= {name} if declared_by == "export" else set()
        self.values[name] = value

    def _forget(self, names: Iterable[str | None]) -> None:
        for name in names:
            if name is not None and _NAME.fullmatch(name):
                self.values[name] = None

    def _forget_all(self) -> None:
        self.values.clear()
        self.is_sourced = True

    def _take_document(self, text: str | None) -> None:
        """Give a here-document to the last command: `read`, or one that writes it into a file."""
        words = self.last
        is_certain = not self.stack and not self.is_conditional
        if words[:1] == ("cat",) and len(words) == 1 and len(self.last_targets) == 1:
            self.written[self.last_targets[0]] = text if is_certain and text is not None else None
        elif words[:1] == ("tee",) and len(words) == 2:
            self.written[words[1]] = text if not self.stack and text is not None else None
        elif words[:1] == ("read",) and _NAME.fullmatch(words[-1]) and is_certain:
            # With `-r` and `-d ''` it reads everything.
            reads_all = any(one.startswith("-") and one.endswith("d") and not value for one, value in pairwise(words))
            is_raw = any(one.startswith("-") and "r" in one for one in words)
            if text is not None and reads_all and (is_raw or "\\" not in text):
                self.values[words[-1]] = text.strip()

    def _text(self, word: Word) -> str | None:
        """Return what a word says as one text, as in an assignment; what is not known in it stays what is written.

        None where nothing can be said: an array, or an expansion with blanks, at which it would fall apart later.
        """
        parts: list[str] = []
        for piece in word:
            value = self._value(piece.text) if piece.is_expansion else piece.text
            if value is None:
                value = self._as_written(piece.text)
                if len(value.split()) != 1:
                    return None
            if not isinstance(value, str):
                return None
            self._spend(len(value))
            parts.append(value)
        return "".join(parts)

    def _spend(self, num_chars: int) -> None:
        self.num_chars += num_chars
        if self.num_chars > _MAX_EXPANDED:
            raise ValueError(f"more than {_MAX_EXPANDED} characters once its variables are known")

    def _expand(self, word: Word) -> list[str]:
        """Return the words that a word becomes: none, one or several; each knows where it is written."""
        fields: list[str] = []
        is_open = False
        for piece in word:
            value = self._value(piece.text) if piece.is_expansion else piece.text
            if isinstance(value, str) and (piece.is_quoted or not piece.is_expansion):
                parts = [value]
            elif value is None or (isinstance(value, str) and _splits_oddly(value, piece.text, len(word))):
                parts = [self._as_written(piece.text)]
            else:
                parts = list(value) if piece.is_quoted else _split(value)
            self._spend(sum(map(len, parts)) + len(parts))
            if not parts:
                continue
            if is_open:
                fields[-1] += parts[0]
                parts = parts[1:]
            fields += parts
            is_open = True
        line = word[0].line if word else 0
        place = Place(self.path, line) if self.path is not None and line else None
        return [one if isinstance(one, PlacedText) else PlacedText(one, place) for one in fields]

    def _as_written(self, text: str) -> str:
        """Return an expansion that is not known; arguments are told from those of the script."""
        if text[1:2] in ("@", "*") or text[1:2].isdigit() or text.startswith(("${@", "${*")):
            owner = " of a function" if self._in_function else " of set" if self.has_other_arguments else ""
            return text + owner
        return text

    @property
    def _in_function(self) -> bool:
        """Is this the body of a function that nobody calls?"""
        return self.stack[:1] == ["function"]

    def _value(self, text: str) -> Value:
        """Return what an expansion stands for, or None where nobody knows."""
        if self._in_function:
            return None
        if (found := _ARGUMENT.fullmatch(text)) is not None:
            return self._argument(found)
        if (found := _DEFAULT.fullmatch(text)) is not None:
            return self._or_default(found["name"], found["how"], found["default"])
        place = place_of_script(text, self.path)
        return expanded(text, self.values.get) if place is None else place

    def _argument(self, found: re.Match[str]) -> Value:
        self.takes_arguments |= not self.has_other_arguments
        if self.arguments is None:
            if self.has_other_arguments or found["all"] is None:
                return None
            self.assumed["$@"] = None
            return ()
        if found["number"]:
            at = int(found["number"])
            return self.arguments[at - 1] if at <= len(self.arguments) else ""
        return self.arguments if found["all"] == "@" else str(len(self.arguments)) if found["count"] else None

    def _or_default(self, name: str, how: str, default: str) -> str | None:
        takes_empty = not how.startswith(":")
        has_value = False
        if name.isdigit() and self.arguments is not None:
            has_value = int(name) <= len(self.arguments)
            value: Value = self.arguments[int(name) - 1] if has_value else None
        elif name in self.values or self.is_sourced or (name.isdigit() and self.has_other_arguments):
            has_value, value = True, self.values.get(name)
        else:
            self.assumed[name] = None
        if has_value:
            if not isinstance(value, str) or "$" in value or "`" in value:
                return None  # it may be empty
            has_value = bool(value) or takes_empty
        if how.endswith("+"):
            if not has_value:
                return ""
        elif has_value and isinstance(value, str):
            return value
        if default[:1] in ("'", '"') and default[-1:] == default[0] and len(default) > 1:
            default = default[1:-1]
        if any(char in default for char in "'\"\\`"):
            return None  # quotes inside the braces of an expansion have rules of their own
        result = self._text(pieces_of(default))
        if how.endswith("=") and not name.isdigit():
            self.values[name] = None if self.stack or self.is_conditional else result
        return result


def _joined(before: Value, value: Value) -> Value:
    """Return what `name+=…` makes of a variable."""
    if isinstance(before, tuple):
        return before + value if isinstance(value, tuple) else None
    return before + value if isinstance(before, str) and isinstance(value, str) else None


def _split(value: str | tuple[str, ...]) -> list[str]:
    """Return the fields of a value that is not quoted."""
    if isinstance(value, str):
        return value.split()
    return [one if one.split() == [one] else part for one in value for part in one.split()]


def _splits_oddly(value: str, written: str, num_pieces: int) -> bool:
    """Do blanks at the ends of a value cut its neighbours off, or do quotes in `${X:-"a b"}` keep it whole?"""
    has_blank = len(value.split()) > 1
    return (num_pieces > 1 and value != value.strip()) or (has_blank and any(quote in written for quote in "'\""))


def _assigned_in(functions: Iterable[_Function]) -> set[str]:
    """Return the variables that functions assign, whenever they are called."""
    names: set[str] = set()
    for token in chain.from_iterable(one.tokens for one in functions):
        if token.kind == "array":
            names.add(token.text)
        elif _is_assignment(token) and (found := _ASSIGNMENT.match(token.word[0].text)) is not None:
            names.add(found["name"])
    return names


def _literal(token: Token) -> str | None:
    """Return a word that is written without quotes and expansions."""
    if token.kind != "word" or any(piece.is_quoted or piece.is_expansion for piece in token.word):
        return None
    return "".join(piece.text for piece in token.word)


def _is_assignment(token: Token) -> bool:
    if token.kind == "array":
        return True
    first = token.word[0] if token.word else None
    return (
        first is not None
        and not first.is_quoted
        and not first.is_expansion
        and _ASSIGNMENT.match(first.text) is not None
    )
