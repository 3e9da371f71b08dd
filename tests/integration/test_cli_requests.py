"""`roq request` and `roq serve` on a real cluster."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq.cli.requests import TOLD_CHARACTERS
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli, end, line_of


@pytest.fixture
def cli(cluster: RunningCluster) -> Cli:
    return Cli(cluster.zookeeper)


@pytest.fixture
def asked(cli: Cli, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh queue."""
    name = f"cli-{request.node.name}"
    cli.run("queue", "create", name)
    yield name
    cli.run("queue", "rm", name)


@pytest.mark.quick
def test_a_command_answers_requests(cli: Cli, asked: str) -> None:
    command = 'read -r line; echo "$ROQ_TOPIC $line" | tr a-z A-Z; [ "$line" != no ] || { echo "no is no" >&2; exit 3; }'
    with cli.started("serve", asked, "eu.*", "--exec", command, "--jobs", "2", "--count", "4") as serving:
        assert line_of(serving.stderr) == b"roq serve: ready\n"
        assert cli.run("request", asked, "eu.paris", "x y").stdout == b"EU.PARIS X Y\n\n"
        assert cli.run("request", asked, "eu.paris", "-", stdin=b"in").stdout == b"EU.PARIS IN\n\n"
        shown = json.loads(cli.run("request", asked, "eu.paris", "a", "--json", "-H", "n=1").stdout)
        assert (shown["payload"], shown["headers"], len(shown["responder"])) == ("EU.PARIS A\n", {}, 16)
        failed = cli.run("request", asked, "eu.paris", "no", code=1)
        assert failed.stderr == b"roq: RequestFailed: exit code 3: no is no\n"
        assert end(serving) == (b"", b"")
        assert serving.returncode == 0
    nobody = cli.run("request", asked, "eu.paris", code=1)
    assert b"NoResponder: nobody serves 'eu.paris'" in nobody.stderr
    assert b"`roq serve`" in nobody.stderr


def test_a_text_answers_and_a_command_that_takes_too_long_fails(cli: Cli, asked: str, tmp_path: Path) -> None:
    with cli.started("serve", asked, "--reply", "pong") as serving:
        assert line_of(serving.stderr) == b"roq serve: ready\n"
        assert cli.run("request", asked, "ping").stdout == b"pong\n"
        serving.send_signal(signal.SIGTERM)
        end(serving)
        assert serving.returncode == 128 + signal.SIGTERM
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with cli.started("serve", asked, "--exec", f"touch {begun}; sleep 4; touch {ended}") as serving:
        assert line_of(serving.stderr) == b"roq serve: ready\n"
        late = cli.run("request", asked, "t", "--seconds", "1.5", code=1)
        assert b"DeadlineExceeded: no answer to a request on 't'" in late.stderr
        assert begun.exists()
        assert not ended.exists()
        assert cli.run("request", asked, "t", "--seconds", "20").stdout == b"\n"
        assert ended.exists()


def test_words_that_are_wrong_are_usage(cli: Cli) -> None:
    assert b"either --reply TEXT or --exec COMMAND" in cli.run("serve", "q", code=2).stderr
    assert b"either --reply TEXT or --exec COMMAND" in cli.run("serve", "q", "--reply", "a", "--exec", "b", code=2).stderr
    assert b"InvalidTopic" in cli.run("request", "q", "", code=1).stderr
    assert TOLD_CHARACTERS < 4096, "fits into an answer"
