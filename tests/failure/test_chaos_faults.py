"""`roq chaos` in containers: what a machine sends comes late, and a disk is full, under all loads but shuffles."""

from __future__ import annotations

import pytest

from tests.harness.chaos_run import roq_chaos

NO_QUICK_TEST = "half a minute of load in containers"
ARGUMENTS = {"--seconds": 20, "--every": 9, "--seed": 5, "--publishers": 1, "--subscribers": 1, "--rate": 100}


@pytest.mark.timeout(300)
async def test_delayed_packets_and_a_full_disk(image: str) -> None:
    flags = ("--faults", "delay-host,fill-disk-host", "--image", image)
    result, code, errors = await roq_chaos(flags, ARGUMENTS, 280, where="--docker")
    assert (result["problems"], result["violations"], result["undecided"], code) == ([], [], [], 0), errors
    assert {fault["kind"] for fault in result["faults"]} == {"delay", "fill-disk"}
    assert not any(fault["error"] for fault in result["faults"]), errors
    assert {load["outcome"] for load in result["loads"]} == {"passed"}
