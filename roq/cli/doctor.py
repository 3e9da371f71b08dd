"""`roq doctor`: what is wrong with this machine, or with the cluster, and what to do about it."""

from __future__ import annotations

import os

import typer
import uvloop
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption, given_address
from roq.cli.doctor_cluster import check_cluster
from roq.cli.doctor_machine import check_machine
from roq.cli.finding import Finding, Verdict
from roq.cli.output import console, print_json

STYLE = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.WRONG: "bold red"}


def doctor(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Check this machine, and the cluster if one is configured, also whether a disk may be replaced now. Exit code 1 when
    something is wrong."""
    address = given_address(cluster, os.environ)
    findings = check_machine()
    if address is not None:
        findings += uvloop.run(check_cluster(address))
    wrong = sum(finding.verdict == Verdict.WRONG for finding in findings)
    if json:
        print_json({"healthy": not wrong, "findings": findings})
    else:
        _print(findings, wrong, address)
    raise typer.Exit(1 if wrong else 0)


def _print(findings: list[Finding], wrong: int, address: str | None) -> None:
    out = console()
    for finding in findings:
        line = Text(f"{finding.verdict:<8}", style=STYLE[finding.verdict])
        out.print(line.append(f"{finding.subject}: {finding.found}", style="default"))
        if finding.advice:
            out.print(Text(f"         → {finding.advice}"))
    if address is None:
        out.print(Text("no cluster is configured: give --cluster or ROQ_CLUSTER to have one checked"))
    out.print(Text(f"{wrong} wrong" if wrong else "nothing is wrong"))
