"""What an HCM remembers: the state file, its lock, process start times, ports, exit reasons."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hcm import machine
from hcm.children import exit_reason
from hcm.local_state import LOGS_KEPT, ChildRecord, LocalState, StateDirectory
from roq.errors import CallError, InvalidConfiguration, PortTaken
from roq.runtime.liveness import start_time
from roq.wire.assignment import ProcessKind, ProcessSpec
from roq.wire.policy import Policy

ADDRESS = "127.83.7.1"  # nobody else listens there


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StateDirectory]:
    made = StateDirectory(tmp_path / "state")
    yield made
    made.close()


async def test_what_is_saved_is_loaded(directory: StateDirectory) -> None:
    state = directory.load("h")
    assert state.children == {}
    spec = ProcessSpec(ProcessKind.SCALING, "orders, all", policy=Policy())
    state.epoch, state.draining, state.sessions = 7, True, [2**63 + 1]
    state.children[spec.name] = ChildRecord(spec, {"control": 7000}, slot=3, pid=12, started=34, served=True)
    await directory.save(state)
    assert directory.load("h") == state


async def test_a_cancelled_save_does_not_disturb_the_next(directory: StateDirectory) -> None:
    state = directory.load("h")
    for epoch in range(20):
        state.epoch = epoch
        cancelled = asyncio.ensure_future(directory.save(state))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        await directory.save(state)
        assert directory.load("h").epoch == epoch


async def test_state_of_another_host_and_damaged_state_are_refused(directory: StateDirectory) -> None:
    await directory.save(directory.load("h"))
    with pytest.raises(InvalidConfiguration, match="'h'"):
        directory.load("other")
    (directory.path / "state.json").write_bytes(b'{"host": "h", ')
    with pytest.raises(InvalidConfiguration, match="damaged"):
        directory.load("h")


async def test_pids_of_an_earlier_boot_are_forgotten(directory: StateDirectory) -> None:
    state = directory.load("h")
    spec = ProcessSpec(ProcessKind.MONITOR, "orders")
    state.boot = "yesterday"
    state.children[spec.name] = ChildRecord(spec, {"control": 7000}, slot=0, pid=12, started=34)
    await directory.save(state)
    record = directory.load("h").children[spec.name]
    assert (record.pid, record.ports) == (0, {"control": 7000})


def test_one_hcm_per_directory(directory: StateDirectory) -> None:
    with pytest.raises(CallError, match="another HCM"):
        StateDirectory(directory.path)


def test_slots_and_ports_are_not_given_twice() -> None:
    spec = ProcessSpec(ProcessKind.MONITOR, "q")
    state = LocalState("h", children={f"p{n}": ChildRecord(spec, {"control": 7000 + n}, slot=n) for n in (0, 1, 3)})
    assert state.free_slot() == 2
    assert state.ports_in_use() == {7000, 7001, 7003}


def test_log_names_fit_any_process_name(directory: StateDirectory) -> None:
    assert directory.log_of("exchange/orders/3f").name == "exchange_orders_3f.log"
    names = {directory.log_of(f"monitor/{'€' * 99}{last}").name for last in "ab"}
    assert len(names) == 2
    assert all(len(name.encode()) <= 255 for name in names)


def test_old_logs_of_former_processes_are_removed(directory: StateDirectory) -> None:
    for age in range(LOGS_KEPT + 5):
        log = directory.log_of(f"exchange/q/{age}")
        log.touch()
        os.utime(log, (1e9 - age, 1e9 - age))
    directory.prune_logs([f"exchange/q/{LOGS_KEPT + 4}"])
    left = {log.name for log in directory.logs.iterdir()}
    assert len(left) == LOGS_KEPT + 1
    assert directory.log_of(f"exchange/q/{LOGS_KEPT + 4}").name in left
    assert directory.log_of(f"exchange/q/{LOGS_KEPT + 3}").name not in left


def test_start_time_names_one_life() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(process.pid) is None  # a zombie is no life
        process.wait()
    assert start_time(process.pid) is None


def test_ports_skip_what_is_taken_and_go_round() -> None:
    with socket.socket() as other:
        other.bind((ADDRESS, 0))
        other.listen()
        taken = other.getsockname()[1]
        base = taken - 1
        chosen, after = machine.choose_ports(ProcessKind.SCALING, ADDRESS, base, 10, start=taken, used=set())
        assert taken < chosen["control"] < base + 10
        assert after == chosen["control"] + 1
        used = set(range(taken + 1, base + 10))
        chosen, _ = machine.choose_ports(ProcessKind.SCALING, ADDRESS, base, 10, start=after, used=used)
        assert chosen == {"control": base}
        with pytest.raises(PortTaken):
            machine.choose_ports(ProcessKind.MONITOR, ADDRESS, base, 10, start=0, used=used)
    assert machine.is_free(ADDRESS, taken)


def test_an_exit_reason_tells_the_last_error_of_that_process(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    records = [
        {"level": "error", "pid": 7, "message": "process ends with an error", "error": "PortTaken", "reason": "can't bind x:1"},
        {"level": "info", "pid": 7, "message": "bye"},
        {"level": "error", "pid": 8, "message": "another life"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert exit_reason(1, 7, file) == "exit code 1: process ends with an error: PortTaken: can't bind x:1"
    assert exit_reason(-9, 9, file) == "killed by SIGKILL"
    assert exit_reason(0, 7, file) == "exit code 0"
    file.write_text("Fatal Python error: Segmentation fault\n")
    assert exit_reason(-11, 7, file) == "killed by SIGSEGV: Fatal Python error: Segmentation fault"
    assert exit_reason(None, 7, tmp_path / "none") == "ended (nobody saw how)"
