"""What holds for every command: JSON for programs, an example that can be called, a place in the help.

Not covered: what the JSON says (tests/integration/test_cli_operator.py runs them).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from roq.cli.examples import EXAMPLES
from roq.cli.main import COMMANDS, GROUPS, PANEL_OF, PANELS, app

# Commands without --json: they serve, print what is for programs as it is, or are for eyes.
NO_DATA = {
    "demo",  # for eyes
    "host install",  # prints files as they are written
    "console",  # serves it, JSON too
    "metrics",  # serves them, JSON too
    "pipeline run",  # what the job prints
    "policy init",  # prints TOML, which `policy set` reads
    "serve",  # answers; prints nothing
}


def walk(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command, with the words that lead to it."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from walk(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


ALL = dict(walk(typer.main.get_group(app)))


def has_json(command: Any) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


def test_every_command_that_prints_or_changes_something_prints_json() -> None:
    without = {words for words, command in ALL.items() if not has_json(command)}
    assert without - NO_DATA == set(), "give these --json"
    assert NO_DATA - without == set(), "these have --json, or are gone"


def test_every_command_has_an_example() -> None:
    visible = {words for words, command in ALL.items() if not command.hidden}
    assert visible - EXAMPLES.keys() == set(), "no example in roq/cli/examples.py"
    assert EXAMPLES.keys() - visible == set(), "examples of commands that are gone"
    for words in ("queue create", "up"):
        text = CliRunner().invoke(app, [*words.split(), "--help"]).stdout
        assert f"Example: {EXAMPLES[words]}" in " ".join(text.split())


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_an_example_is_a_call_that_is_understood(words: str) -> None:
    [call] = re.findall(rf"(?:^|[|&] )(roq {words}\b.*?)(?= [|&>] ?| && |$)", EXAMPLES[words])
    arguments = shlex.split(call)[1 + len(words.split()) :]
    ALL[words].make_context(words, arguments)


# Parameters that name what a shell can complete, and are no name of what is there.
NEW_NAMES = {
    ("host install", "host"),  # of this machine, which joins
    ("context add", "address"),  # of a cluster
    ("metrics", "addresses"),  # of clusters and folders
    ("queue group create", "group"),
    ("serve", "group"),  # of whoever answers: the cluster does not list them
    ("request", "group"),
}


def test_every_name_that_a_cluster_knows_is_completed() -> None:
    """The names of parameters say what they are, as everywhere in the help."""
    without = {
        (words, parameter.name)
        for words, command in ALL.items()
        for parameter in command.params
        if _names_something(parameter) and parameter._custom_shell_complete is None
    }
    assert without - NEW_NAMES == set(), "give these a completer of roq/cli/completion.py"
    assert NEW_NAMES - without == set(), "these have one, or are gone"


def _names_something(parameter: Any) -> bool:
    kinds = {"HOST", "QUEUE", "GROUP", "ADDRESS"} & set(re.findall(r"[A-Z]+", parameter.metavar or ""))
    named = parameter.name in {"host", "queue", "group"} or (parameter.param_type_name == "argument" and bool(kinds))
    return named and not {"--listen", "--hosts"} & set(parameter.opts)


@pytest.mark.parametrize("words", sorted(ALL))
def test_every_command_has_help_that_can_be_shown(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"])
    assert (shown.exit_code, shown.exception) == (0, None), "brackets in a help text are markup: \\[ for one that is none"
    assert f"Usage: roq {words}" in " ".join(shown.output.split()).replace("Usage: root", "Usage: roq")


def test_every_command_has_a_place_in_the_help() -> None:
    names = {*COMMANDS, *GROUPS}
    assert names - PANEL_OF.keys() == set(), "no panel in roq/cli/main.py"
    assert PANEL_OF.keys() - names == set()
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
