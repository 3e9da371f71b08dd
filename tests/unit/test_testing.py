"""roq.testing without any cluster: firewall rules, owners, waits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from roq.errors import DeadlineExceeded, NotReady
from roq.runtime.liveness import start_time
from roq.testing.cluster import CLIENT, Cut, TestedCluster
from roq.testing.engine import alive, owner
from roq.testing.links import Links

ADDRESSES = {"a": "198.18.0.1", "b": "198.18.0.2", "c": "198.18.0.3", CLIENT: "198.18.0.9"}
NOTHING = "*filter\n:INPUT ACCEPT\n:OUTPUT ACCEPT\nCOMMIT\n"


def test_a_one_way_cut_is_made_at_its_target() -> None:
    links = Links(ADDRESSES)
    assert links.block({"a"}, {"b"}) == {"b"}
    assert links.block({"a"}, {"b"}) == set(), "as before"
    assert "-A INPUT -s 198.18.0.1 -j DROP" in links.rules("b")
    assert links.rules("a") == NOTHING
    assert links.concern("a")
    assert not links.concern("c")


def test_what_the_client_must_not_hear_is_dropped_by_its_sender() -> None:
    links = Links(ADDRESSES)
    assert links.block({"a", CLIENT}, {CLIENT, "a"}) == {"a"}
    assert "-A OUTPUT -d 198.18.0.9 -j DROP" in links.rules("a")
    assert "-A INPUT -s 198.18.0.9 -j DROP" in links.rules("a")


def test_a_rejection_is_told_and_goes_through_itself() -> None:
    links = Links(ADDRESSES)
    assert links.block({"a"}, {"b"}, Cut.REJECT) == {"b"}
    lines = [line.removeprefix("-A INPUT -s 198.18.0.1 ") for line in links.rules("b").splitlines() if "198.18.0.1" in line]
    assert lines == [
        "-p tcp --tcp-flags RST RST -j ACCEPT",
        "-p icmp -j ACCEPT",
        "-p tcp -j REJECT --reject-with tcp-reset",
        "-j REJECT",
    ]
    assert links.block({"a"}, {"b"}) == {"b"}, "another way of being cut"
    assert "-A INPUT -s 198.18.0.1 -j DROP" in links.rules("b")
    assert links.block({"a"}, {CLIENT}, Cut.REJECT) == {"a"}
    assert "-A OUTPUT -d 198.18.0.9 -p tcp -j REJECT --reject-with tcp-reset" in links.rules("a")


def test_groups_are_cut_from_each_other_and_healed() -> None:
    links = Links(ADDRESSES)
    assert links.block({"a", "b"}, {"b", "c"}) == {"b", "c"}
    assert set(links.blocked) == {("a", "b"), ("a", "c"), ("b", "c")}
    links.delayed.add("a")
    assert "NFQUEUE" in links.rules("a")
    assert links.heal() == {"a", "b", "c"}
    assert {links.rules(name) for name in "abc"} == {NOTHING}


def test_an_owner_is_one_life_of_a_process() -> None:
    boot, pid, start = owner().split("/")
    assert alive(owner())
    for gone in (f"{boot}/{pid}/1{start}", f"other/{pid}/{start}", f"{boot}/4194999/1", f"{boot}/4194999/None", "", "x"):
        assert not alive(gone)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        theirs = f"{boot}/{process.pid}/{start_time(process.pid)}"
        assert alive(theirs)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(theirs)  # its zombie owns nothing


async def test_a_wait_ends_with_what_was_last_seen() -> None:
    answers = iter([False, True])

    async def second() -> bool:
        return next(answers)

    assert await TestedCluster.wait_for(second, "it is so", 5.0)

    async def never() -> bool:
        raise NotReady("not yet")

    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s until it is so; at last: NotReady: not yet"):
        await TestedCluster.wait_for(never, "it is so", 0.1)
