"""Every `roq …` that a text names can be given: in documents, comments, examples, unit files, and in what the code says.

Checked: the words lead to a command, and it has each option that follows. Not covered: arguments, and what a command does
(blocks of documents are run, tests/unit/test_documented_blocks.py; examples in the help, test_cli_commands.py).
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from roq.cli.main import app

ROOT = Path(__file__).parents[2]
WHERE = ("roq", "gcm", "hcm", "benchmarks", "docker", "deploy", "examples", "docs", "tools", "*.md", "Makefile")
HISTORY = ("docs/decisions/", "CHANGELOG.md", "docs/spec/")  # what was decided or released then names what there was then
ENDS = re.compile(r"[|&;<>#…]|\$\(|\.\.\.")  # what follows is no part of the command
CLI: Any = typer.main.get_command(app)


def spans(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, command from `roq` on): what stands between backticks, and outside of Python, lines that begin with it."""
    for found in re.finditer(r"`(roq [^`]+)`", text):
        yield text.count("\n", 0, found.start()) + 1, re.sub(r"\n[\s#]*", " ", found[1])
    if not path.endswith(".py"):
        for found in re.finditer(r"^(?:[\s#$]|\w+=|- )*(?:\S*/)?(roq [^`\n]+)", text, re.MULTILINE):
            yield text.count("\n", 0, found.start()) + 1, found[1]


def option_of(command: Any, word: str) -> Any:
    """The parameter that an option belongs to, or None."""
    name = word.partition("=")[0]
    return next((one for one in command.params if name in (*one.opts, *one.secondary_opts)), None)


def fault(call: str) -> str | None:
    """What can't be given in `call`, or None."""
    try:
        words = iter(shlex.split(ENDS.split(call)[0]))
    except ValueError:  # a quote that ends elsewhere: prose
        words = iter(call.split())
    next(words)
    command = CLI
    for word in words:
        rest_is_not_ours = "{" in word or word == "--" or command.context_settings.get("ignore_unknown_options")
        if rest_is_not_ours or (word == "COMMAND" and command is CLI):
            return None
        if word == "--help":
            continue
        if word.startswith("-") and len(word) > 1:
            option = option_of(command, word)
            if option is None:
                return f"no option {word} of `roq {command.name or ''}`"
            if not option.is_flag and "=" not in word:
                next(words, None)
        elif hasattr(command, "commands"):
            command = command.get_command(None, word)
            if command is None:
                return f"no command {word!r}"
    return None


def commands_in_texts() -> Iterator[tuple[str, str]]:
    """("file:line", command) of the whole repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *WHERE]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if not name.startswith(HISTORY) and not name.endswith((".svg", ".png")) and (ROOT / name).is_file():
            for line, call in spans(name, (ROOT / name).read_text(errors="replace")):
                yield f"{name}:{line}", call


def test_every_command_that_a_text_names_can_be_given() -> None:
    found = list(commands_in_texts())
    assert len(found) > 300, "the search finds nothing anymore"
    assert [f"{where}: {call}: {why}" for where, call in found if (why := fault(call))] == []


@pytest.mark.parametrize(
    "call",
    [
        "roq group ls",
        "roq --card admin.card -c zk1 status",
        "roq queue create orders --no-such",
        "roq status --no-such | head",
    ],
)
def test_what_cannot_be_given_is_found(call: str) -> None:
    assert fault(call) is not None


@pytest.mark.parametrize(
    "call", ["roq queue group ls", "roq status -c zk1 --json | jq .", "roq --card a.card status", "roq host stop {host} --x"]
)
def test_what_can_be_given_is_not(call: str) -> None:
    assert fault(call) is None
