"""`ckpt help`: commands and topics, the page of one of them, or the help of a command."""

from __future__ import annotations

from ckpt_tools.cli import main
from ckpt_tools.cli.commands import COMMANDS
from ckpt_tools.cli.help_text import EXIT_CODES, topics
from ckpt_tools.cli.output import say
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.options.output import HelpOptions
from ckpt_tools.text import did_you_mean


def run(asked: HelpOptions) -> int:
    """Print what was asked for."""
    pages = topics()
    if asked.topic in COMMANDS:
        return main([str(asked.topic), "--help"])
    if asked.topic is None:
        main(["--help"])
        say("\nTopics, for `ckpt help TOPIC`:")
        for name, text in pages.items():
            say(f"  {name:<12}  {text.splitlines()[0].lstrip('# ')}")
    elif asked.topic in pages:
        say(page(asked.topic))
    else:
        hint = (did_you_mean(asked.topic, [*pages, *COMMANDS]), "ckpt help lists commands and topics")
        raise UsageError(f"no such command or topic: {asked.topic}", hint=" ".join(filter(None, hint)))
    return 0


def page(topic: str) -> str:
    """Return the page of a topic in Markdown, with the list that the code makes for it."""
    made = {"formats": _formats, "exit-codes": _exit_codes}.get(topic, list)()
    return "\n".join([topics()[topic].strip(), *[""][: len(made)], *made])


def _formats() -> list[str]:
    from ckpt_tools.checkpoint.formats.table import FORMATS, find_format

    return [f"- `{name}`: {find_format(name).found_by}" for name in FORMATS]


def _exit_codes() -> list[str]:
    """Return the exit codes, with the words of `error.code` in JSON."""
    known = [CkptError]
    for kind in known:
        known += kind.__subclasses__()
    words = {code: dict.fromkeys(f"`{each.code}`" for each in known if each.exit_code == code) for code in EXIT_CODES}
    return [": ".join(filter(None, (f"- {code} {text}", " ".join(words[code])))) for code, text in EXIT_CODES.items()]
