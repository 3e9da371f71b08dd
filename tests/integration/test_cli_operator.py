"""What people who look after a cluster use, against one: JSON of every command that has it, `roq top` on a terminal, names that
a real bash completes, contexts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from roq import blocking
from roq.errors import RoqError
from roq.wire.recording import Record
from tests.harness import commands
from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, ROOT, environment
from tests.unit.test_cli_commands import ALL, has_json

pytestmark = pytest.mark.timeout(150)  # a command takes seconds on a busy machine
QUEUE, WORK, GROUP = "operated", "operated-work", "billing"
# Words of a command → how it is called here. {name}: of the place below.
CALLS = {
    "bench pubsub": "--publishers 1 --subscribers 1 --messages 100 --topics 1",
    "context list": "",
    "context ls": "",
    "context show": "",
    "doctor": "",
    "events": "--count 1",
    "fleet set": "--max 0",
    "fleet show": "",
    "history show": "",
    "host ls": "",
    "host rebalance": "",
    "host show": "{host}",
    "pipeline ls": "",
    "policy replay": "{kpis} --policy {policy}",
    "policy show": QUEUE,
    "pub": f"{QUEUE} eu.paris",
    "queue add-exchange": QUEUE,
    "queue create": QUEUE,
    "queue durables": QUEUE,
    "queue group create": f"{QUEUE} {GROUP}",
    "queue group ls": QUEUE,
    "queue kpis": f"{QUEUE} --count 1",
    "queue ls": "",
    "queue move": f"{QUEUE} {{exchange}}",
    "queue producers": QUEUE,
    "queue read": QUEUE,
    "queue show": QUEUE,
    "queue tapes": QUEUE,
    "queue template show": "",
    "shuffle ls": "",
    "status": "",
    "sub": f"{QUEUE} --start earliest --count 1 --until-idle 20",
    "task dead ls": WORK,
    "task dead requeue": f"{WORK} --all",
    "task dead rm": f"{WORK} --all",
    "task lease": WORK,
    "task ls": "",
    "task move": "{folder} {other}",
    "task peek": WORK,
    "task purge": "{folder} --yes",
    "task put": f"{WORK} one two",
    "task release-all": "{folder}",
    "task status": WORK,
    "task watch": f"{WORK} --count 1",
    "top": "--count 1",
    "version": "",
}
# Words of a command that changes something → how it is called here, one after the other, and what it says it has changed.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "policy set": ("{queue} --default", {"queue": "{queue}", "set": True, "policy": ANY}),
    "queue drain-exchange": ("{queue} {exchange}", {"queue": "{queue}", "exchange": "{exchange}", "drained": True}),
    "queue forget-durable": ("{queue} reader", {"queue": "{queue}", "durable": "reader", "forgotten": True}),
    "queue forget-producer": ("{queue} loader", {"queue": "{queue}", "producer": "loader", "forgotten": True}),
    "queue group rm": ("{queue} some", {"queue": "{queue}", "group": "some", "removed": True}),
    "queue record": ("{queue} off", {"queue": "{queue}", "recorded": False, "record": None}),
    "queue stop": ("{queue}", {"queue": "{queue}", "stopped": True}),
    "queue start": ("{queue}", {"queue": "{queue}", "started": True}),
    "queue rm": ("{queue}", {"queue": "{queue}", "removed": True}),
    "queue template set": ("", {"set": True, "template": ANY}),
    "task create": ("{work}", {"address": "{work}", "created": True, "settings": ANY}),
    "task rm": ("{work}", {"address": "{work}", "removed": True}),
    "host cordon": ("host-2", {"host": "host-2", "cordoned": True, "processes": ANY}),
    "host uncordon": ("host-2", {"host": "host-2", "cordoned": False, "processes": ANY}),
    "history on": ("--days 1", {"history": True, "record": ANY}),
    "history off": ("", {"history": False, "record": None}),
}
ELSEWHERE = {  # who runs them with --json
    **{f"access {name}": "tests/unit/test_cli_changes.py" for name in ("admit", "grant", "revoke")},
    "access ls": "test_secured_cluster.py",
    "access push": "test_secured_cluster.py",
    "backup restore": "test_backup.py",
    "backup save": "test_backup.py",
    "backup show": "test_backup.py",
    "backup verify": "test_backup.py",
    **{f"ca {name}": "tests/unit/test_cli_changes.py" for name in ("init", "revoke", "rotate", "sign", "zookeeper")},
    "chaos": "test_chaos.py",
    **{f"context {name}": "tests/unit/test_cli_changes.py" for name in ("add", "remove", "rm", "use")},
    "down": "test_cli_down.py",
    "host drain": "test_evacuation.py",
    "host evacuate": "test_evacuation.py",
    "host new-disk": "test_host_stop.py",
    "host stop": "test_host_stop.py",
    "request": "test_cli_requests.py",
    "shuffle rebalance": "test_cli_shuffle.py",
    "shuffle rm": "test_cli_shuffle.py",
    "shuffle show": "test_cli_shuffle.py",
    **{f"task {name}": "tests/unit/test_cli_changes.py" for name in ("ack", "extend", "reject", "release")},
    "task shards": "test_shards.py",
    "up": "test_cli.py",
    "upgrade check": "test_upgrade.py",
}


def test_every_command_with_json_is_run_here_or_elsewhere() -> None:
    visible = {words for words, command in ALL.items() if has_json(command)}
    assert visible - CALLS.keys() - CHANGES.keys() - ELSEWHERE.keys() == set(), "say how it is called, or who calls it"
    assert (CALLS.keys() | CHANGES.keys() | ELSEWHERE.keys()) - visible == set(), "gone, or without --json"


@pytest.fixture(scope="module")
def places(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A recorded queue with a message, a work queue with tasks, and files, on the shared cluster; by the names in CALLS."""
    folder = tmp_path_factory.mktemp("operator")
    (folder / "policy.toml").write_text("")
    with blocking.connect(cluster.zookeeper) as client:
        created = client.create_queue(QUEUE, record=Record(days=1.0))
        with client.publisher(QUEUE, confirm="stored") as publisher:
            publisher.publish("eu.paris", b"good morning")
        client.create_work_queue(WORK)
        with blocking.open_queue(f"roq://{cluster.zookeeper}/{WORK}") as work:
            work.put(b"to be leased")
        (folder / "kpis.jsonl").write_text(run(cluster, "queue", "kpis", QUEUE, "--count", "1").stdout)
        with blocking.open_queue(f"file://{folder}/tasks") as tasks:
            tasks.put(b"moved")
        yield {
            "exchange": next(iter(created.record.exchanges)),
            "host": "host-1",
            "kpis": f"{folder}/kpis.jsonl",
            "policy": f"{folder}/policy.toml",
            "folder": f"{folder}/tasks",
            "other": f"{folder}/others/",
        }
        client.remove_queue(QUEUE)
        client.remove_work_queue(WORK)


def run(cluster: RunningCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roq.cli", *arguments],
        input="a line\n",
        capture_output=True,
        text=True,
        env=environment(cluster.zookeeper),
        timeout=COMMAND_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("words", sorted(CALLS))
def test_what_it_prints_with_json_is_json(words: str, cluster: RunningCluster, places: dict[str, str]) -> None:
    done = run(cluster, *words.split(), *shlex.split(CALLS[words].format(**places)), "--json")
    assert done.returncode == 0 or words == "doctor", done.stderr
    lines = done.stdout.splitlines()
    assert lines or words == "policy replay", done.stderr
    for line in lines:
        assert isinstance(json.loads(line), dict | list)


def test_what_changes_something_says_what_with_json(cluster: RunningCluster) -> None:
    """Nothing else is said on either stream."""
    queue = "changed"
    with blocking.connect(cluster.zookeeper) as client:
        names = {"queue": queue, "exchange": next(iter(client.create_queue(queue, record=Record(days=1.0)).record.exchanges))}
        client.create_group(queue, "some")
        with client.publisher(queue, producer="loader"), client.subscriber(queue, durable="reader"):
            pass
    names["work"] = f"roq://{cluster.zookeeper}/changed-work"
    run(cluster, "queue", "add-exchange", queue)
    for words, (arguments, changed) in CHANGES.items():
        called = [*words.split(), *arguments.format(**names).split(), "--json"]
        done = commands.run(*called, environment=environment(cluster.zookeeper), timeout=COMMAND_SECONDS)
        assert (done.returncode, done.stderr) == (0, b""), called
        said = {key: value.format(**names) if isinstance(value, str) else value for key, value in changed.items()}
        assert json.loads(done.stdout) == said, called


# --- top ----------------------------------------------------------------------------------------------------------------


class Terminal:
    """`roq …` on a terminal of 100 columns."""

    def __init__(self, zookeeper: str, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        variables = {**environment(zookeeper), "TERM": "xterm"}
        command = [sys.executable, "-m", "roq.cli", *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=variables, cwd=ROOT)
        self._shown = ""

    def until(self, *wanted: str) -> str:
        """What was shown since the last call, up to where all of these have been."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while not all(one in self._shown for one in wanted):
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted} not in {self._shown}"
            if select.select([self._master], [], [], left)[0]:
                self._shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._master, 65536).decode(errors="replace"))
        found, self._shown = self._shown, ""
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def settings(self) -> list[object]:
        return list(termios.tcgetattr(self._slave))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(cluster: RunningCluster, places: dict[str, str]) -> Iterator[Terminal]:
    made = Terminal(cluster.zookeeper, "top", "--every", "0.5")
    yield made
    made.close()


@pytest.mark.quick
def test_top_shows_sorts_and_opens_what_is_chosen(terminal: Terminal, places: dict[str, str]) -> None:
    terminal.until("queues  leader", QUEUE, "QUEUE▲")
    terminal.type(b"2")
    terminal.until("tasks  leader", "WORK QUEUE▲", WORK)
    terminal.type(b"s")
    terminal.until("MASTER▲")
    terminal.type(b"3")
    terminal.until("HOST", "host-1", "host-2")
    terminal.type(b"\r")
    terminal.until("Processes", "store")
    terminal.type(b"\x1b")
    terminal.until("hosts  leader", "host-2")
    terminal.type(b"q")
    assert terminal.process.wait(COMMAND_SECONDS) == 0
    assert terminal.settings() == terminal.before


def test_top_opens_a_queue_at_once_and_says_when_it_is_gone(cluster: RunningCluster, places: dict[str, str]) -> None:
    terminal = Terminal(cluster.zookeeper, "top", "--every", "0.5", "--queue", QUEUE)
    try:
        terminal.until(f"{QUEUE}: ready", "recorded:", "Exchanges")
    finally:
        terminal.close()
    terminal = Terminal(cluster.zookeeper, "top", "--every", "0.5", "--host", "none")
    try:
        terminal.until("none is there no longer")
        os.kill(terminal.process.pid, 2)
        assert terminal.process.wait(COMMAND_SECONDS) == 130
        assert terminal.settings() == terminal.before
    finally:
        terminal.close()


# --- completion and contexts --------------------------------------------------------------------------------------------


def in_bash(home: Path, script: str) -> str:
    """What an interactive bash of this home prints; `roq` is ours."""
    variables = {
        **environment(),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "PATH": f"{home}/bin:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-ic", script], env=variables, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    return done.stdout


def completed(home: Path, line: str) -> list[str]:
    """What Tab offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(map(shlex.quote, words))
    script = (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _roq_completion roq 2>&1; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    return in_bash(home, script).split()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With `roq` in its path, and its completion installed as people do it."""
    program = tmp_path / "bin" / "roq"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom roq.cli.main import main\n\nmain()\n")
    program.chmod(0o755)
    in_bash(tmp_path, "roq --install-completion; true")  # else bash becomes `roq`, which looks for its shell
    return tmp_path


@pytest.mark.quick
def test_a_shell_completes_commands_and_names_of_the_cluster_in_use(
    cluster: RunningCluster, places: dict[str, str], home: Path
) -> None:
    assert "context" in completed(home, "roq con")
    assert "created" not in in_bash(home, f"roq context add here {cluster.zookeeper}")
    assert completed(home, "roq context use h") == ["here"]
    assert completed(home, "roq queue show oper") == [QUEUE]
    assert completed(home, "roq host show ") == ["host-1", "host-2"]
    assert completed(home, "roq task status operated-") == [WORK]
    assert completed(home, f"roq queue show -c {cluster.zookeeper} oper") == [QUEUE]
    begun = time.monotonic()
    assert completed(home, "roq queue show -c 127.0.0.1:1 ") == []
    assert time.monotonic() - begun < COMMAND_SECONDS / 2
    assert json.loads(in_bash(home, "roq queue show --json operated"))["summary"]["queue"] == QUEUE


def test_groups_are_completed_of_the_queue_before(cluster: RunningCluster, places: dict[str, str], home: Path) -> None:
    with blocking.connect(cluster.zookeeper) as client:
        client.create_group(QUEUE, "grouped")
        try:
            assert completed(home, f"roq queue group rm -c {cluster.zookeeper} {QUEUE} gr") == ["grouped"]
        finally:
            client.remove_group(QUEUE, "grouped")
            with pytest.raises(RoqError):
                client.work_queue(f"{QUEUE}@grouped")
