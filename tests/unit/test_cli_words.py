"""One name for one thing: a walk over all commands of the command line, their arguments and their options."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from typer.testing import CliRunner, Result

from roq.cli.main import app

NO_ADDRESS = "127.0.0.1:nowhere"  # refused at once, where a ZooKeeper that is away is waited for
OLD = {"old_cluster", "old_place", "old_seconds"}  # what 0.1 took, hidden
FIRST = {  # what a group's commands work on; they name it first
    "queue": "QUEUE",
    "host": "HOST",
    "policy": "QUEUE",
    "task": "ADDRESS",
    "shuffle": "NAME",
    "pipeline": "JOB",
}
OTHER_FIRST: dict[tuple[str, ...], str] = {
    ("host", "rebalance"): "on|off|show",  # all hosts
    ("policy", "init"): "POLICY.TOML",
    ("policy", "replay"): "KPIS.JSONL|POLICY.TOML",
    ("task", "move"): "FROM",
}


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def every_command(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from every_command(command, (*words, name))
        else:
            yield (*words, name), command


def test_every_command_names_first_what_it_works_on_and_the_cluster_as_an_option() -> None:
    for words, command in every_command(typer.main.get_group(app)):
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        assert {one.name for one in arguments if one.hidden} <= OLD, words
        shown = [(one.metavar or one.name).strip("[].…") for one in arguments if not one.hidden]
        if words[0] in FIRST and shown:
            assert shown[0] == OTHER_FIRST.get(words, FIRST[words[0]]), words
        assert "CLUSTER" not in shown, words
        assert "ADDRESS" not in shown[1:] or words == ("context", "add"), words
        assert [one.required for one in arguments] == sorted((one.required for one in arguments), reverse=True), words


def kind(option: Any) -> str:
    """Of the value: int, str, Path …"""
    declared = option.type_descriptor.annotation
    return str(next((one for one in get_args(declared) if one is not type(None)), declared))


def test_an_option_has_one_name_one_letter_and_one_type_in_every_command() -> None:
    letters: dict[str, set[str]] = {}
    shapes: dict[str, set[tuple[frozenset[str], str]]] = {}
    for words, command in every_command(typer.main.get_group(app)):
        options = [one for one in command.params if one.param_type_name == "option"]
        assert {one.name for one in options if one.hidden} <= OLD, words
        for option in (one for one in options if not one.hidden):
            [long] = [name for name in option.opts if name.startswith("--")]
            short = {name for name in option.opts if not name.startswith("--")}
            shapes.setdefault(long, set()).add((frozenset(short), kind(option)))
            for letter in short:
                letters.setdefault(letter, set()).add(long)
    assert {letter: names for letter, names in letters.items() if len(names) > 1} == {}
    assert {name: found for name, found in shapes.items() if len(found) > 1} == {}
    assert {"--cluster", "--seconds", "--json", "--count"} <= set(shapes)
    assert not {"--duration", "--time", "--timeout", "--zookeeper-address"} & set(shapes)


def test_what_0_1_took_is_still_taken(tmp_path: Path) -> None:
    folder = str(tmp_path)
    place: tuple[str, ...]
    for place in ((folder,), ("-c", folder)):
        assert roq("shuffle", "ls", *place, "--json").stdout == "[]\n"
        assert "no shuffle 'x' in " + folder in roq("shuffle", "show", "x", *place).stderr
    assert roq("shuffle", "ls", folder, "-c", folder).exit_code == 2
    for place in ((NO_ADDRESS,), ("-c", NO_ADDRESS)):
        assert f"ZooKeeper address '{NO_ADDRESS}'" in roq("task", "ls", *place).stderr
    roq("task", "put", f"{folder}/tasks", "one")
    [row] = json.loads(roq("task", "lease", f"{folder}/tasks", "-s", "7", "--json").stdout)
    assert 0 < row["expires"] - time.time() < 8
    for name in ("--seconds", "--duration"):
        assert "--publishers is from" in roq("bench", "pubsub", name, "1", "--publishers", "0").stderr
