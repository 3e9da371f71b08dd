"""The page of all commands, from the command tree itself: what `--help` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from roq.cli.main import app as roq_app
from roq.tools.simulation.__main__ import app as simulation_app


def page() -> str:
    """Markdown: a heading for each group and each command."""
    programs = {"roq": roq_app, "roq-sim": simulation_app}
    return "\n".join(line for name, app in programs.items() for line in _lines(typer.main.get_command(app), name, None))


def _lines(command: Any, path: str, parent: Any) -> Iterator[str]:
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    commands = {name: command.get_command(context, name) for name in names}
    yield f"##{'#' * path.count(' ')} {path}\n"
    yield f"{_text(command.help or '')}\n"
    if not names:
        pieces = " ".join(command.collect_usage_pieces(context))
        yield f"    {path} {pieces}\n"
    yield from _parameters(command, context)
    if getattr(command, "epilog", None):
        yield f"{_text(command.epilog)}\n"
    for name, one in commands.items():
        if not one.hidden:
            yield from _lines(one, f"{path} {name}", context)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{_cell(words)}` | {_cell(_text(about))} |" for words, about in filter(None, records)]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows, ""])


def _text(help_text: str) -> str:
    """Brackets are no links and angles no tags here."""
    return help_text.replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*") if "`" not in help_text else help_text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
