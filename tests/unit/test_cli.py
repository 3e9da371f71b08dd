"""The command line without a cluster: usage errors, exit codes, formatting, address resolution, streams.

Not covered: anything that talks to a cluster, see tests/integration/test_cli.py.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from roq.cli import main as cli_main
from roq.cli import output
from roq.cli.address import cluster_address, given_address
from roq.cli.main import app
from roq.cli.output import counted, print_error, rate, seconds, size
from roq.cli.policy import FIELDS, policy_toml, read_policy, sample_toml
from roq.cli.pub_sub import Output, read_lines
from roq.cli.queue import find_exchange, find_publishers
from roq.cli.status import exchange_table, host_table
from roq.client.overview import ExchangeRow, HostRow, policy_tables
from roq.errors import CallError, ExchangeNotFound, InvalidConfiguration, PayloadTooLarge, PublisherNotFound, QueueNotFound
from roq.runtime import log_output
from roq.wire.assignment import Overflow
from roq.wire.kpi import ExchangeKpi, HostKpi, PublisherKpi, QueueKpi
from roq.wire.monitor import ExchangeAddress, ExchangeView, MemberView, QueueView
from roq.wire.policy import Bounds, ExchangeRule, Policy, policy_from_toml

NOWHERE = "127.0.0.1:1"  # nothing listens there


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- exit codes and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("queue", "nonsense"),
        ("queue", "create"),
        ("queue", "create", "q", "--overflow", "sometimes"),
        ("queue", "create", "q", "--replication", "0"),
        ("queue", "show"),
        ("pub", "q"),
        ("sub", "q", "--count", "many"),
        ("up", "--hosts", "0"),
        ("policy", "set", "q"),
        ("policy", "replay", "kpis.jsonl"),
        ("status", "--nonsense"),
    ],
)
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = roq(*arguments)
    assert result.exit_code == 2
    assert not result.stdout


def test_policy_set_takes_a_file_or_the_default_but_not_both(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text("")
    assert roq("policy", "set", "q", str(file), "--default").exit_code == 2


def test_a_refusal_is_exit_code_1_and_one_line_on_stderr() -> None:
    result = roq("pub", "-c", NOWHERE, "q", "bad\0topic")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("roq: InvalidTopic: ")
    assert result.stderr.count("\n") == 1


def test_a_wrong_address_is_refused() -> None:
    result = roq("status", "-c", "not an address")
    assert result.exit_code == 1
    assert "InvalidConfiguration" in result.stderr


def test_help_is_exit_code_0_and_tells_every_command() -> None:
    result = roq("--help")
    assert result.exit_code == 0
    for command in ("up", "demo", "status", "top", "queue", "pub", "sub", "host", "policy", "bench", "doctor", "version"):
        assert command in result.stdout


def commands(group: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command, with the words that lead to it."""
    found = [words]
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        found += commands(command, (*words, name)) if hasattr(command, "commands") else [(*words, name)]
    return found


def test_every_command_has_help() -> None:
    for words in commands(typer.main.get_group(app)):
        result = roq(*words, "--help")
        assert result.exit_code == 0, f"{words}: {result.exception}"
        assert "Usage" in result.stdout


def imported_by(*arguments: str) -> set[str]:
    """What `roq …` has imported when it ends."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); import roq.cli.main as m; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=True)
    return set(done.stderr.split())


def test_a_command_imports_only_what_it_needs() -> None:
    shared = {f"roq.cli.{name}" for name in ("main", "address", "completion", "examples", "output", "which")}
    assert {name for name in imported_by("--version") if name.startswith("roq.cli.")} == shared
    assert not {"docker", "prometheus_client", "pyarrow", "pytest"} & imported_by("--help")  # which imports all commands


def test_version_as_json() -> None:
    result = roq("version", "--json")
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)) == {"roq", "python", "uvloop", "msgspec", "kazoo"}


def test_version_is_an_option_too() -> None:
    result = roq("--version")
    assert (result.exit_code, result.stdout) == (0, json.loads(roq("version", "--json").stdout)["roq"] + "\n")


def test_errors_tell_their_class_and_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(QueueNotFound("no queue 'x'"))
    assert capsys.readouterr().err == "roq: QueueNotFound: no queue 'x' (`roq queue ls` lists the queues there are)\n"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 0), (QueueNotFound(), 1)])
def test_how_a_command_ends(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("roq.cli.main.installed_version", fail)
    monkeypatch.setattr(cli_main, "_silence_stdout", lambda: None)
    assert roq("version").exit_code == code


def test_a_closed_standard_stream_is_no_error() -> None:
    for closed in ("<&-", ">&-", "<&- >&-"):
        done = subprocess.run(["bash", "-c", f"{sys.executable} -m roq.cli version {closed}"], capture_output=True, check=False)
        assert done.returncode == 0
        assert not done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m roq.cli --help | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=30, check=False)
    assert done.stdout
    assert b"Traceback" not in done.stderr


# --- address ----------------------------------------------------------------------------------------------------------


def test_address_order_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    file.write_text('cluster = "from-file:2181"')
    assert cluster_address("flag:1", {"ROQ_CLUSTER": "env:1"}, (file,)) == "flag:1"
    assert cluster_address(None, {"ROQ_CLUSTER": "env:1"}, (file,)) == "env:1"
    assert cluster_address(None, {}, (tmp_path / "missing.toml", file)) == "from-file:2181"
    assert cluster_address(None, {"ROQ_CONFIG": str(file)}, ()) == "from-file:2181"
    assert cluster_address(None, {}, ()) == "127.0.0.1:2181"
    assert given_address(None, {}, ()) is None


@pytest.mark.parametrize("text", ["cluster = ", 'clutser = "x:1"', "cluster = 5"])
def test_a_wrong_configuration_file_is_told(text: str, tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfiguration):
        cluster_address(None, {}, (file,))


# --- formatting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (12.34, "12.3"), (1500, "1.5 k"), (2_000_000, "2 M"), (3.2e9, "3.2 G")])
def test_rates(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (2048, "2.0 KiB"), (5 * 1024**2, "5.0 MiB"), (3 * 1024**4, "3.0 TiB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0000123, "12 µs"), (0.0123, "12.3 ms"), (2.5, "2.5 s")])
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_what_is_piped_is_neither_wrapped_nor_cut(tmp_path: Path) -> None:
    """Wherever it is: a narrow window, a CI that claims to be a dumb terminal with colours."""
    folder = tmp_path / ("long-" * 30)
    roq("task", "put", str(folder), "x" * 59)
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "40"}
    for command in ("status", "peek"):
        done = subprocess.run(
            [sys.executable, "-m", "roq.cli", "task", command, str(folder)], capture_output=True, env=environment, check=True
        )
        said = done.stdout.decode()
        assert "\x1b" not in said
        assert f"file://{folder}\n" in said if command == "status" else "x" * 59 + "\n" in said
    rows = [("q" * 300, "e" * 300), ("", "f")]
    program = f"from roq.cli.output import console, table; console().print(table('', ('A', '>B'), {rows!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
    assert [line.split() for line in done.stdout.decode().splitlines()] == [["A", "B"], ["q" * 300, "e" * 300], ["f"]]


# --- policies ---------------------------------------------------------------------------------------------------------

POLICY = Policy(exchange=ExchangeRule(max_messages_per_second=100.0), bounds=Bounds(max_exchanges=3))


def test_a_policy_prints_as_it_is_read() -> None:
    assert policy_from_toml(policy_toml(POLICY)) == POLICY
    assert policy_from_toml(policy_toml(Policy())) == Policy()


def test_the_sample_policy_has_every_field_and_is_taken_as_it_stands(tmp_path: Path) -> None:
    assert list(FIELDS) == [f"{table}.{name}" for table, fields in policy_tables(Policy()).items() for name in fields]
    file = tmp_path / "p.toml"
    assert "roq policy set QUEUE" in roq("policy", "init", str(file)).stderr
    assert file.read_text() == roq("policy", "init").stdout
    found = policy_tables(read_policy(file))
    assert {name: found[name.partition(".")[0]][name.partition(".")[2]] for name in FIELDS} == {
        name: field.sample if field.active else None for name, field in FIELDS.items()
    }
    every = re.sub(r"^# (?=\w+ = )", "", file.read_text(), flags=re.MULTILINE)
    assert policy_tables(policy_from_toml(every))["queue"]["max_publishers_per_exchange"] == 100
    again = roq("policy", "init", str(file))
    assert again.exit_code == 1
    assert "exists" in again.stderr
    assert read_policy(file) == policy_from_toml(sample_toml())


def test_the_sample_policy_scales_out_where_a_host_is_overloaded(tmp_path: Path) -> None:
    record, policy = tmp_path / "kpis.jsonl", tmp_path / "p.toml"
    calm = _kpi(1000.0, 240.0)
    [exchange] = calm.exchanges
    busy = msgspec.structs.replace(
        calm, exchanges=(msgspec.structs.replace(exchange, cpu_fraction=0.9),), hosts=(HostKpi("h1", 0.95, 0.1, 1, 8),)
    )
    record.write_bytes(b"\n".join(msgspec.json.encode(msgspec.structs.replace(busy, time=1000.0 + n)) for n in range(20)))
    roq("policy", "init", str(policy))
    result = roq("policy", "replay", str(record), "--policy", str(policy))
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1001.0))
    assert result.stdout.startswith(f"{moment}  +1 s  scale-out  host h1 uses 95% of its CPU (limit 80%)")
    assert re.search(r"\d+ decisions in 19 s since ", result.stderr)


def test_the_page_about_policies_tells_every_field_and_the_sample() -> None:
    page = (Path(output.__file__).parents[2] / "docs/policies.md").read_text()
    for table, fields in policy_tables(Policy()).items():
        for name, default in fields.items():
            field = FIELDS[f"{table}.{name}"]
            unset = "off" if default is None else default
            assert f"| `{table}.{name}` | {field.unit} | {unset} | {field.meaning} |\n" in page
    assert f"```toml\n{sample_toml()}```\n" in page


def test_a_missing_policy_file_is_refused(tmp_path: Path) -> None:
    result = roq("policy", "set", "q", str(tmp_path / "none.toml"), "-c", NOWHERE)
    assert result.exit_code == 1
    assert "InvalidPolicy" in result.stderr


def _kpi(at: float, messages_per_second: float) -> QueueKpi:
    exchange = ExchangeKpi("e1", "h1", "active", 4, messages_per_second, 0.0, 0.0, 0.1, 0)
    publishers = tuple(PublisherKpi(number, "e1", messages_per_second / 4, 0.0, 0.0, 0) for number in (1, 2, 3, 4))
    hosts = (HostKpi("h1", 0.1, 0.1, 1, 8),)
    return QueueKpi("q", at, 1, messages_per_second, 0.0, 0.0, 0, (exchange,), publishers, (), hosts)


def test_replay_tells_decisions_and_their_causes(tmp_path: Path) -> None:
    record, policy = tmp_path / "kpis.jsonl", tmp_path / "p.toml"
    record.write_bytes(b"\n".join(msgspec.json.encode(_kpi(1000.0 + second, 240.0)) for second in range(20)) + b"\n\n")
    policy.write_text(policy_toml(POLICY))
    result = roq("policy", "replay", str(record), "--policy", str(policy), "--json")
    assert result.exit_code == 0, result.stderr
    decisions = [json.loads(line) for line in result.stdout.splitlines()]
    assert "scale-out" in {decision["action"] for decision in decisions}
    assert all(decision["cause"] for decision in decisions)
    assert roq("policy", "replay", str(record), "--policy", str(policy)).exit_code == 0


def test_replay_names_the_unreadable_line(tmp_path: Path) -> None:
    record, policy = tmp_path / "kpis.jsonl", tmp_path / "p.toml"
    record.write_bytes(msgspec.json.encode(_kpi(1.0, 1.0)) + b"\n{}\n")
    policy.write_text("")
    result = roq("policy", "replay", str(record), "--policy", str(policy))
    assert result.exit_code == 1
    assert "line 2" in result.stderr


def test_read_policy_names_the_wrong_field(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[bounds]\nmax_exchange = 3\n")
    with pytest.raises(CallError, match="max_exchange"):
        read_policy(file)


# --- finding Exchanges and publishers by how their ids begin ----------------------------------------------------------

ADDRESS = ExchangeAddress("", "127.0.0.1", 1, 2)


def _view() -> QueueView:
    exchanges = tuple(
        ExchangeView(msgspec.structs.replace(ADDRESS, id=id), "h1", "active", 0, 0) for id in ("aa11", "aa22", "bb33")
    )
    members = (
        MemberView(0xAB00000000000001, "publisher", ("aa11",), 1, True, 0.0),
        MemberView(0xAB00000000000002, "publisher", ("bb33",), 1, True, 0.0),
        MemberView(0xCD00000000000003, "subscriber", ("aa11", "bb33"), 0, True, 0.0),
    )
    return QueueView("q", 1, Overflow.DROP, exchanges, members, (), None, {})


def test_an_exchange_is_found_by_how_its_id_begins() -> None:
    assert find_exchange(_view(), "b") == "bb33"
    assert find_exchange(_view(), "aa11") == "aa11"
    with pytest.raises(CallError, match="aa11, aa22"):
        find_exchange(_view(), "aa")
    with pytest.raises(ExchangeNotFound):
        find_exchange(_view(), "cc")


def test_publishers_are_found_by_how_their_ids_begin() -> None:
    one, two = 0xAB00000000000001, 0xAB00000000000002
    assert find_publishers(_view(), [], "bb33") == [one]
    assert find_publishers(_view(), [f"{two:016X}"], "aa11") == [two]
    with pytest.raises(CallError):
        find_publishers(_view(), ["ab"], "aa22")
    with pytest.raises(PublisherNotFound):
        find_publishers(_view(), ["cd"], "aa22")


# --- streams ----------------------------------------------------------------------------------------------------------


async def _lines(descriptor: int, line_bytes_max: int = 1 << 20) -> list[bytes]:
    return [line async for lines in read_lines(descriptor, line_bytes_max) for line in lines]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"\xff\r\n\0\n", [b"\xff\r", b"\0"]),
    ],
)
async def test_lines_of_a_file_are_raw_bytes(data: bytes, lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(data)
    with path.open("rb") as file:
        assert await _lines(file.fileno()) == lines


async def test_lines_of_a_pipe_come_as_they_are_written() -> None:
    reader, writer = os.pipe()
    wanted = [b"x" * (n % 300) for n in range(20_000)]
    out = Output(writer)

    async def write() -> None:
        await out.write(b"\n".join(wanted) + b"\n")
        out.close()
        os.close(writer)

    try:
        _, lines = await asyncio.gather(write(), _lines(reader))
        assert lines == wanted
    finally:
        os.close(reader)


async def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 5000)
    with path.open("rb") as file, pytest.raises(PayloadTooLarge):
        await _lines(file.fileno(), 4000)


async def test_devnull_is_an_empty_input() -> None:
    with open(os.devnull, "rb") as nothing:  # noqa: ASYNC230
        assert await _lines(nothing.fileno()) == []


async def test_a_full_pipe_does_not_block_the_loop_and_a_closed_one_is_seen() -> None:
    reader, writer = os.pipe()
    out = Output(writer)
    gone = asyncio.ensure_future(out.reader_gone())
    writing = asyncio.ensure_future(out.write(b"x" * 8_000_000))
    await asyncio.sleep(0.05)
    assert not writing.done()
    assert not gone.done()
    os.close(reader)
    async with asyncio.timeout(5):
        await gone
        with pytest.raises(BrokenPipeError):
            await writing
    out.close()
    os.close(writer)


# --- what comes from others is shown, not obeyed -----------------------------------------------------------------------

HOSTILE = ("[red]x[/red] [/nope]", "[null]", ":heart:", "[link=x]y[/link]", "\x1b[2Jwiped", "a\rb")
SHOWN = ("[red]x[/red] [/nope]", "[null]", ":heart:", "[link=x]y[/link]", "\\x1b[2Jwiped", "a\\rb")


@pytest.mark.parametrize(("text", "expected"), [*zip(HOSTILE, SHOWN, strict=True)])
def test_foreign_text_is_neither_markup_nor_an_escape_sequence(
    text: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output.console().print(output.table(text, ("COLUMN OF SOME WIDTH",), [(text,)]))
    out = capsys.readouterr().out
    assert out.count(expected) == 2
    assert "\x1b" not in out
    output.say(text)
    print_error(QueueNotFound(text))
    assert capsys.readouterr().err.count(expected) == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.working(text):
        pass
    assert expected in capsys.readouterr().err


def test_tasks_of_any_content_are_listed_by_every_command(tmp_path: Path) -> None:
    folder = str(tmp_path / "tasks")
    for number, text in enumerate(HOSTILE):
        assert roq("task", "put", folder, text, "--priority", str(len(HOSTILE) - number)).exit_code == 0
    peeked, leased = roq("task", "peek", folder), roq("task", "lease", folder, "--count", "99")
    tokens = [row.split()[0] for row in leased.stdout.splitlines()[1:]]
    for token, text in zip(tokens, HOSTILE, strict=True):
        assert roq("task", "reject", folder, token, "--error", text).exit_code == 0
    dead, status = roq("task", "dead", "ls", folder), roq("task", "status", folder)
    watched = roq("task", "watch", folder, "--count", "1")
    for expected in SHOWN:
        assert expected in peeked.stdout
        assert expected in leased.stdout
        assert dead.stdout.count(expected) == 2, dead.stdout
    for result in (peeked, leased, dead, status, watched):
        assert result.exit_code == 0, result.stderr
        assert "\x1b" not in result.stdout


def test_every_console_is_made_where_markup_is_off() -> None:
    sources = Path(output.__file__).parents[1].rglob("*.py")
    makers = sorted(path.name for path in sources if "Console(" in path.read_text() and "rich.console" in path.read_text())
    assert makers == ["log_output.py", "output.py"]
    assert "Console(stderr=True, markup=False, emoji=False)" in Path(log_output.__file__).read_text()


def test_hosts_stand_in_a_line_each_on_a_terminal_of_80_columns() -> None:
    rows = tuple(HostRow(f"host-{number}", "127.119.254.11", True, False, 7, 8, 12, 36, 0, 1, 0.99, 0.98) for number in (1, 2))
    screen = Console(width=80, file=io.StringIO())
    screen.print(host_table(rows))
    assert isinstance(screen.file, io.StringIO)
    assert len(screen.file.getvalue().splitlines()) == 2 + len(rows)


def test_one_task_and_two_tasks() -> None:
    assert [counted(count, "task") for count in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]


def test_the_exchanges_fit_into_80_characters() -> None:
    rates = (123e3, 2.0**20 * 99.9, 2.0**20 * 999.9, 1.0)
    row = ExchangeRow("orders", "a2f5be03a442a220", "host-1", "127.0.0.1", "draining", 100, 100, *rates, 2**20 * 99)
    out = Console(width=80, record=True, file=io.StringIO())
    out.print(exchange_table((row,)))
    title, head, *rows = out.export_text().splitlines()
    assert (title, len(rows)) == ("Exchanges", 1), "nothing is folded"
    assert head.split()[:2] == ["QUEUE", "EXCHANGE"]
    assert rows[0].split()[:3] == ["orders", "a2f5be03", "host-1"]
