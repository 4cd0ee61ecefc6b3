"""The Typer application, and the one place where errors become exit codes."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from ckpt_tools._version import __version__
from ckpt_tools.cli import commands, help_text
from ckpt_tools.cli.output import note, print_error
from ckpt_tools.cli.streams import OutputError, guarded_streams
from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.signals import STOP_SIGNALS
from ckpt_tools.text import did_you_mean, escape_name

_UNMAPPED = "failed to map segment"  # What the dynamic linker says when there is no address space for a library
_TRUE = ("1", "true", "t", "yes", "y", "on")  # Values of an environment variable that set a flag, as in click


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckpt {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Convert, inspect and verify PyTorch FSDP2 checkpoints; check runs; manage adapters.

    `ckpt SRC` shows what SRC is: a file, a directory, a training step, or hf://org/name.
    """


class _InterruptedError(CkptError):
    """Somebody pressed Ctrl-C, or ended the process by a signal that can be answered."""

    exit_code = 130
    code = "interrupted"


def _guarded(name: str, command: Callable[..., int]) -> Callable[..., int]:
    """Turn Ctrl-C into an error like any other, which typer would swallow, and lead from a misuse to the help."""

    @functools.wraps(command)
    def run(**options: object) -> int:
        try:
            return command(**options)
        except UsageError as error:
            if type(error) is UsageError and (error.hint or "?").endswith("?"):
                error.hint = _to_help(error.hint, f"ckpt {name}")
            raise
        except KeyboardInterrupt as error:
            notes: list[str] = getattr(error, "__notes__", [])
            what = "; ".join(["interrupted", *notes[:1]])
            raise _InterruptedError(what, hint="; ".join(notes[1:]) or None) from error

    return run


def _to_help(hint: str | None, command: str) -> str:
    return f"{hint} See {command} --help" if hint else f"see {command} --help"


def _quickly(params: list[Any], texts: Collection[str] = ()) -> list[Any]:
    """Let options take text, or nothing, as it is: typer's conversion loads pydantic, which nobody need wait for."""
    for param in params:
        own = functools.partial(_value_of, param, param.process_value, is_text=param.name in texts)
        vars(param).setdefault("process_value", own)
    return params


def _value_of(
    param: TyperArgument | TyperOption,
    convert: Callable[[typer.Context, Any], Any],
    ctx: typer.Context,
    value: object,
    *,
    is_text: bool,
) -> object:
    if value is None and not param.required:
        return () if param.multiple else None
    return value if is_text and value is not None else convert(ctx, value)


def _refused(error: typer.TyperException, ctx: Any) -> UsageError:  # noqa: ANN401 - typer's
    """Return what typer says of wrong arguments, with the nearest option and the help to look at."""
    hint, option = None, getattr(error, "option_name", "")
    what = error.message if option else error.format_message()
    if what.startswith("No such option"):
        flags = [flag for each in ctx.command.get_params(ctx) for flag in (*each.opts, *each.secondary_opts)]
        longer = [flag for flag in flags if flag.startswith(option) and len(option) > 3]
        hint = f"did you mean {longer[0]}?" if longer else did_you_mean(option, flags)
        hint = hint or (None if ctx.parent else f"options follow a command: ckpt COMMAND {option}.")
    if what.startswith("Missing argument"):
        needed = [each for each in ctx.command.get_params(ctx) if isinstance(each, TyperArgument) and each.required]
        words = " ".join(f"{each.metavar}{'...' * (each.nargs != 1)}" for each in needed)
        hint = f"usage: {ctx.command_path} [OPTIONS] {words}."
    return UsageError(what[:1].lower() + what[1:].rstrip("."), hint=_to_help(hint, ctx.command_path))


class _CommandParser(TyperCommand):
    texts: Collection[str] = ()  # Parameters that are text

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the options of the command, and --help."""
        return _quickly(super().get_params(ctx), self.texts)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        """Write what --help shows."""
        help_text.write_help(self, ctx, formatter)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Let words after `--` be overrides, where a command has them."""
        if "--" in args and any(param.name == "override" for param in self.params):
            at = args.index("--")
            args = [*args[:at], *(f"--override={word}" for word in args[at + 1 :])]
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _refused(error, ctx) from None


class _Commands(TyperGroup):
    """Lists commands as their table has them, and loads the one that runs."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the options before a command."""
        return _quickly(super().get_params(ctx))

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Print the help where nothing is asked for; that is no success, so that no script takes it for one."""
        if not args and not ctx.resilient_parsing:
            note(ctx.get_help())
            ctx.exit(2)
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _refused(error, ctx) from None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:  # type: ignore[override]
        """Find the command; what looks like a place without one is inspected."""
        word = args[0]
        if word not in self.commands and (any(sign in word for sign in "/.") or os.path.lexists(word)):
            return "inspect", _load("inspect"), args
        if word in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from ckpt_tools.storage.locations import likely

        hint = did_you_mean(word.lower(), self.commands) or likely(word)
        raise UsageError(f"no such command, file or directory: {word}", hint=_to_help(hint, "ckpt"))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]  # noqa: ARG002
        """Load a command."""
        return _load(cmd_name) if cmd_name in self.commands else None

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        """Write what --help shows."""
        help_text.write_root(self, ctx, formatter)


@functools.cache
def _load(name: str) -> TyperCommand:
    app = _new_app(add_completion=False)
    found, function = commands.COMMANDS[name], commands.load(name)
    app.command(name, cls=_CommandParser, help=found.help)(_guarded(name, function))
    command = cast("_CommandParser", typer.main.get_command(app))
    kinds = {each.name: get_args(each.annotation)[0] for each in inspect.signature(function).parameters.values()}
    command.texts = [name for name, kind in kinds.items() if kind in (str, str | None, list[str] | None)]
    return command


@functools.cache
def _application() -> Callable[..., object]:
    app = _new_app(cls=_Commands)
    app.callback()(_root)
    for name, command in commands.COMMANDS.items():
        app.command(name, help=command.short)(lambda: 0)
    return typer.main.get_command(app)


def _new_app(**settings: Any) -> typer.Typer:  # noqa: ANN401 - typer's
    return typer.Typer(
        name="ckpt",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **settings,
    )


def _is_set(argv: list[str], *names: str, variable: str) -> bool:
    """Is a flag given, or set in the environment? For errors that come before or without a command's own parsing."""
    return any(name in argv for name in names) or os.environ.get(variable, "").strip().lower() in _TRUE


@contextmanager
def _stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM (schedulers) and SIGHUP (closing terminals) do what Ctrl-C does: stop, and leave things in order."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup, nor where the caller has its own way
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(argv: list[str]) -> int:
    """Run one command; every error becomes an exit code here."""
    with _stop_signals_interrupt(), guarded_streams():
        return _run_command(argv)


def _run_command(argv: list[str]) -> int:
    as_json = _is_set(argv, "--json", variable="CKPT_JSON")
    verbose = _is_set(argv, "-v", "--verbose", variable="CKPT_VERBOSE")
    try:
        result = _application()(args=argv, prog_name="ckpt", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        print_error(UsageError(error.format_message(), hint="See ckpt --help"), as_json=as_json)
        return UsageError.exit_code
    except OutputError as error:
        is_abandoned = isinstance(error.__cause__, BrokenPipeError)  # its reader has gone (`ckpt inspect … | head`)
        if error.hint is not None or not is_abandoned:
            print_error(error, as_json=as_json)
        return error.exit_code
    except CkptError as error:
        if verbose and not isinstance(error, UsageError):
            import traceback

            note(traceback.format_exc())
        print_error(error, as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):  # before or after a command
        note("interrupted")
        return 130
    except MemoryError as error:  # ulimit -v, a container's bound, or a source that asks for too much
        return _say_exhausted(error, as_json=as_json)
    except OSError as error:
        where = escape_name(error.filename) if isinstance(error.filename, str) else None
        print_error(StorageError(error.strerror or str(error), where=where), as_json=as_json)
        return StorageError.exit_code
    except Exception as error:
        if isinstance(error, ImportError) and _UNMAPPED in str(error):  # a library that is loaded on use
            return _say_exhausted(error, as_json=as_json)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            missing = UsageError("this command needs torch, which is not installed", hint="pip install 'torch>=2.10'")
            print_error(missing, as_json=as_json)
            return missing.exit_code
        note(f"This is a bug in ckpt {__version__} (Python {platform.python_version()}, {platform.platform()}).")
        note("Please report it with the traceback below.")
        raise
    return result if isinstance(result, int) else 0


def _say_exhausted(error: BaseException, *, as_json: bool) -> int:
    exhausted = CkptError("not enough memory", hint="see docs/how-it-works.md#limits; -j 1 needs the least")
    for text in getattr(error, "__notes__", ()):
        exhausted.add_note(text)
    print_error(exhausted, as_json=as_json)
    return exhausted.exit_code
