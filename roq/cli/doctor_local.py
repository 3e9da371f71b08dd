"""`roq doctor`, the local clusters of this machine: which were left by a killed program, and which one commands mean."""

from __future__ import annotations

from collections.abc import Sequence

from roq.cli.down import COMMAND, named
from roq.cli.finding import Finding, good, wrong
from roq.coordination.address import parse_address
from roq.errors import InvalidConfiguration
from roq.tools.local.starter import FoundCluster


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
