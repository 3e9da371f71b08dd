"""Which cluster a command means: contexts, their file, what comes before what, and what it is completed with. No cluster."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from roq.cli import completion
from roq.cli.main import app
from roq.cli.task_address import full_address
from roq.cli.which import Choice, Context, Contexts, choose, contexts_file, read_contexts, take_card, write_contexts
from roq.errors import InvalidAddress, InvalidConfiguration
from roq.runtime import security
from roq.tools.authority import Authority
from roq.wire.card import CardRole
from tests.harness.documented import block


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder that is empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "roq"


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def told(*arguments: str) -> dict[str, str]:
    """Which cluster is meant."""
    result = roq("context", "show", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_contexts_are_added_used_listed_and_removed(home: Path) -> None:
    assert roq("context", "add", "here", "127.0.0.1:2181").exit_code == 0  # the first one is used at once
    assert roq("context", "add", "far", "zk1:2181,zk2:2181/X").exit_code == 0
    file = home / "contexts.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert told() == {"cluster": "127.0.0.1:2181", "why": "context here is in use", "context": "here", "card": ""}
    assert roq("context", "use", "far").exit_code == 0
    assert told()["cluster"] == "zk1:2181,zk2:2181/X"
    rows = json.loads(roq("context", "ls", "--json").stdout)
    assert [(row["context"], row["in_use"]) for row in rows] == [("far", True), ("here", False)]
    assert "*  far" in roq("context", "list").stdout
    assert "none is in use now" in roq("context", "rm", "far").stderr
    assert told()["why"] == "nothing says another"
    assert read_contexts(file) == Contexts("", {"here": Context("127.0.0.1:2181")})


def test_one_that_is_added_with_use_is_in_use() -> None:
    roq("context", "add", "a", "a:1")
    roq("context", "add", "b", "b:1", "--use")
    assert told()["context"] == "b"
    roq("context", "add", "b", "c:1")  # it stands for another one now
    assert told()["cluster"] == "c:1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("use", "none"), "there is no context 'none', there are a"),
        (("rm", "none"), "there is no context 'none', there are a"),
        (("add", "b", "not an address"), "InvalidConfiguration"),
        (("add", "b:1", "zk:1"), "no ':' nor ','"),
        (("add", " ", "zk:1"), "InvalidName"),
        (("add", "b", "zk:1", "--card", "/nowhere/x.card"), "can't read the card"),
    ],
)
def test_what_is_refused_changes_nothing(arguments: tuple[str, ...], says: str) -> None:
    roq("context", "add", "a", "a:1")
    before = contexts_file().read_bytes()
    result = roq("context", *arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert contexts_file().read_bytes() == before


def test_option_before_environment_before_context_before_file(tmp_path: Path) -> None:
    file, named = tmp_path / "client.toml", tmp_path / "named.toml"
    file.write_text('cluster = "file:1"')
    named.write_text('cluster = "named:1"')
    contexts = tmp_path / "contexts.json"

    def chosen(flag: str | None = None, **environment: str) -> Choice | None:
        return choose(flag, environment, (file,), contexts)

    assert chosen() == Choice("file:1", str(file))
    write_contexts(contexts, Contexts("a", {"a": Context("a:1", "/card"), "b": Context("b:1")}))
    assert chosen() == Choice("a:1", "context a is in use", "a", "/card")
    assert chosen(ROQ_CONFIG=str(named)) == Choice("named:1", f"ROQ_CONFIG: {named}")
    assert chosen(ROQ_CONFIG=str(named), ROQ_CLUSTER="env:1") == Choice("env:1", "ROQ_CLUSTER")
    assert chosen(ROQ_CLUSTER="b") == Choice("b:1", "ROQ_CLUSTER: context b", "b")
    assert chosen("flag:1", ROQ_CLUSTER="b") == Choice("flag:1", "--cluster")
    assert chosen("a", ROQ_CLUSTER="b") == Choice("a:1", "--cluster: context a", "a", "/card")
    assert choose(None, {}, (), tmp_path / "none.json") is None
    write_contexts(contexts, Contexts("gone", {}))  # by hand
    assert chosen() == Choice("file:1", str(file))


@pytest.mark.parametrize("text", ["{", '{"current": 5}', '{"contexts": {"a": {"adress": "x:1"}}}', "\xff"])
def test_a_wrong_file_is_told_and_not_overwritten(text: str, home: Path) -> None:
    home.mkdir()
    (home / "contexts.json").write_text(text, encoding="latin-1")
    for command in (("show",), ("ls",), ("add", "a", "a:1")):
        result = roq("context", *command)
        assert result.exit_code == 1
        assert str(home / "contexts.json") in result.stderr
    assert (home / "contexts.json").read_text(encoding="latin-1") == text


def test_the_environment_is_told_where_it_hides_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    roq("context", "add", "a", "a:1")
    monkeypatch.setenv("ROQ_CLUSTER", "env:1")
    assert "is in use, but not here: ROQ_CLUSTER says env:1" in roq("context", "use", "a").stderr
    assert told()["why"] == "ROQ_CLUSTER"


def test_its_card_is_used_unless_another_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = security._ProcessCard()
    monkeypatch.setattr(security, "_process", process)
    authority = Authority.init(tmp_path / "authority.json")
    cards = [tmp_path / name for name in ("one", "two")]
    for path in cards:
        security.write_secret(path, authority.issue(path.name, CardRole.CLIENT, days=1.0))
    assert roq("context", "add", "safe", "zk:1", "--card", str(cards[0])).exit_code == 0
    choice = choose(None)
    assert choice is not None
    assert choice.card == str(cards[0])
    take_card(choice)
    assert process.security is not None
    assert process.security.card.name == "one"
    take_card(choice._replace(card=str(cards[1])))
    assert process.security.card.name == "one"


def test_a_task_queue_of_the_chosen_cluster_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidAddress):
        full_address("resize")
    roq("context", "add", "a", "zk:2181/X")
    assert full_address("resize") == "roq://zk:2181/X/resize"
    assert full_address("orders@billing") == "roq://zk:2181/X/orders@billing"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resize").mkdir()
    assert full_address("resize") == f"file://{tmp_path}/resize"  # a folder that is there


def test_contexts_are_completed() -> None:
    roq("context", "add", "prague", "a:1")
    roq("context", "add", "paris", "b:1")
    assert completion.context_names("pa") == ["paris"]
    assert completion.context_names("") == ["paris", "prague"]


def test_a_cluster_that_cannot_be_asked_completes_nothing_and_says_nothing(
    capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    ctx = typer.Context(typer.main.get_command(app))
    ctx.params["cluster"] = "127.0.0.1:1"
    for names in (completion.queue_names, completion.work_queue_names, completion.host_names, completion.group_names):
        assert names(ctx, "") == []
    home.mkdir(exist_ok=True)
    (home / "contexts.json").write_text("{")
    assert completion.context_names("") == []
    with pytest.raises(InvalidConfiguration):
        choose("x")
    assert capfd.readouterr() == ("", "")


def test_what_the_document_shows() -> None:
    printed = ""
    for line in block("docs/cli.md", "Which cluster").splitlines():
        result = roq(*shlex.split(line)[1:])
        assert result.exit_code == 0, result.stderr
        printed += result.stdout
    assert "zk1:2181,zk2:2181,zk3:2181   (context production is in use)" in printed
    assert read_contexts(contexts_file()).contexts.keys() == {"here"}
