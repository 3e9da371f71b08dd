"""`roq doctor`: what is wrong with this machine, or with the cluster, and what to do about it."""

from __future__ import annotations

import os
import socket

import typer
import uvloop
from rich.text import Text

from roq.cli.address import DEFAULT_ADDRESS, ClusterOption, JsonOption, given_address
from roq.cli.doctor_cluster import check_cluster
from roq.cli.doctor_local import check_local
from roq.cli.doctor_machine import check_machine
from roq.cli.finding import Finding, Severity, warning
from roq.cli.output import console, print_json
from roq.tools.local import starter

LISTENS_SECONDS = 1.0
NONE = "start one here, `roq up`, or name yours: --cluster, ROQ_CLUSTER or a configuration file"
STYLE = {Severity.GOOD: "green", Severity.WARNING: "yellow", Severity.WRONG: "bold red"}


def doctor(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Check this machine and the cluster, also whether a disk may be replaced now. Exit code 1 when something is wrong."""
    given = given_address(cluster, os.environ)
    address = given or DEFAULT_ADDRESS
    findings = check_machine() + check_local(starter.clusters(), address, chosen=given is not None)
    if given is None and not _somebody_listens():
        findings.append(warning("Cluster", f"none at {address}, where commands look if no other is named", NONE))
    else:
        findings += uvloop.run(check_cluster(address))
    wrong = sum(finding.verdict == Severity.WRONG for finding in findings)
    if json:
        print_json({"healthy": not wrong, "cluster": address, "findings": findings})
    else:
        _print(findings, wrong)
    raise typer.Exit(1 if wrong else 0)


def _somebody_listens() -> bool:
    """At the default address."""
    host, _, port = DEFAULT_ADDRESS.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), LISTENS_SECONDS):
            return True
    except OSError:
        return False


def _print(findings: list[Finding], wrong: int) -> None:
    out = console()
    for finding in findings:
        line = Text(f"{finding.verdict:<8}", style=STYLE[finding.verdict])
        out.print(line.append(f"{finding.subject}: {finding.found}", style="default"))
        if finding.advice:
            out.print(Text(f"         → {finding.advice}"))
    out.print(Text(f"{wrong} wrong" if wrong else "nothing is wrong"))
