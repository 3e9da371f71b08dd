"""Every request of every conversation says which right it needs, or is for the cluster's own processes; the rest is denied."""

from __future__ import annotations

import time
import typing
from pathlib import Path

import pytest

from roq.errors import AccessDenied, CallError, InvalidConfiguration
from roq.runtime.security import Security, load_card, members_only, write_secret
from roq.tools.authority import Authority
from roq.wire import gcm, hcm, master, monitor, rights, shuffle, store
from roq.wire.card import CLOCK_SECONDS, Card, CardRole, Grant, Right, new_card
from roq.wire.curve import KeyPair

INSIDE = {  # what no client may ask, with any right
    *(store.OpenSegment, store.FenceLog, store.Recover, store.Read, store.Holes, store.Compare, store.CopySegment),
    *(store.DeleteSegment, store.ListSegments, store.CopyBlob, store.DeleteBlob, store.ListBlobs, store.Add),
    *(shuffle.StorePieces, shuffle.FetchInterval, shuffle.KeepIntervals, shuffle.ForgetShuffle, shuffle.TableChanged),
    *(gcm.ReportRuns, monitor.ExchangeReport, monitor.RecordDecision),
}
CONVERSATIONS = {
    "gcm": (typing.get_args(gcm.Request), rights.GCM),
    "hcm": (typing.get_args(hcm.Request), rights.HCM),
    "monitor": (typing.get_args(monitor.Request) + typing.get_args(monitor.NoticeToMonitor), rights.MONITOR),
    "master": (typing.get_args(master.Request), rights.MASTER),
    "store": ((*typing.get_args(store.Request), store.NoticeToStore), rights.STORE),
    "shuffle": (typing.get_args(shuffle.Request), rights.FOLLOWER),
}


def card(*grants: Grant, role: CardRole = CardRole.CLIENT, name: str = "alice") -> Card:
    return new_card(name, role, bytes(32), grants, 0.0, 1e12)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_each_request_has_a_rule_or_is_for_members(conversation: str) -> None:
    requests, table = CONVERSATIONS[conversation]
    for request in requests:
        rule = table.get(request, rights.MEMBERS)
        allowed = rule[0] if conversation in ("gcm", "hcm") and rule else rule
        assert (allowed == rights.MEMBERS) == (request in INSIDE), request
    assert set(table) <= set(requests)


@pytest.mark.parametrize("right", Right)
@pytest.mark.parametrize(("names", "name", "covered"), [
    ("*", "orders", True), ("orders", "orders", True), ("orders", "orders2", False), ("orders.*", "orders.eu", True),
    ("orders.*", "orders", False), ("orders.*", "*", False), ("*", "*", True),
])  # fmt: skip
def test_a_grant_covers_its_right_and_names(right: Right, names: str, name: str, covered: bool) -> None:
    assert card(Grant(right, names)).allows(right, name) is covered
    for other in Right:
        assert other is right or not card(Grant(right, names)).allows(other, name)


def test_an_error_names_the_right_that_is_missing() -> None:
    allow = rights.for_names(rights.GCM)
    with pytest.raises(AccessDenied, match=r"alice needs the right `admin` to 'orders'"):
        allow(card(Grant(Right.PUBLISH, "*")), gcm.RemoveQueue("orders", "t"))
    with pytest.raises(AccessDenied, match=r"everything"):
        allow(card(Grant(Right.ADMIN, "orders")), gcm.DrainHost("host-1", True, "t"))
    allow(card(Grant(Right.ADMIN, "orders")), gcm.RemoveQueue("orders", "t"))
    allow(card(Grant(Right.LEASE, "orders")), gcm.DescribeWorkQueue("orders"))
    with pytest.raises(AccessDenied):
        allow(card(Grant(Right.LEASE, "orders")), gcm.DescribeWorkQueue("bills"))


def test_an_exchange_reports_for_its_own_host_alone() -> None:
    allow = rights.allow_at_monitor("q")
    where = monitor.ExchangeAddress("A", "127.0.0.1", 1, 2)
    report = monitor.ExchangeReport(where, "host-1", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0)
    allow(card(role=CardRole.HOST, name="host-1"), report)
    everybody = card(*(Grant(right, "*") for right in Right))
    for other in (card(role=CardRole.HOST, name="host-2"), everybody, card(role=CardRole.GCM)):
        with pytest.raises(AccessDenied):
            allow(other, report)


def test_a_clients_rights_at_stores_and_processes() -> None:
    allow = rights.for_any(rights.STORE)
    allow(card(Grant(Right.PUT, "orders")), store.PutBlob("b", 1, 0, 1, b""))
    for request in (store.FenceLog("l", 1 << 60), store.GetBlob("b", 0, 1)):
        with pytest.raises(AccessDenied):
            allow(card(Grant(Right.PUT, "orders")), request)
    with pytest.raises(AccessDenied, match="no host"):
        members_only(card(*(Grant(right, "*") for right in Right)))
    members_only(card(role=CardRole.GCM))


@pytest.mark.parametrize("names", ["", "*x", "a*b", "**"])
def test_names_that_mean_nothing_are_refused(names: str) -> None:
    with pytest.raises(CallError):
        card(Grant(Right.PUT, names))


def test_clocks_and_files(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    now = time.time()
    with pytest.raises(AccessDenied, match=r"begins in 8.* is the clock wrong"):
        Security(authority.issue("late", CardRole.CLIENT, now=now + 86400))
    with pytest.raises(AccessDenied, match="expired"):
        Security(authority.issue("old", CardRole.CLIENT, days=1, now=now - 2 * 86400))
    Security(authority.issue("soon", CardRole.CLIENT, now=now + CLOCK_SECONDS - 5))
    path = tmp_path / "a.card"
    write_secret(path, authority.issue("alice", CardRole.CLIENT))
    assert path.stat().st_mode & 0o777 == 0o600
    assert not load_card(path).serves
    path.chmod(0o640)
    with pytest.raises(InvalidConfiguration, match="read by others"):
        load_card(path)
    (tmp_path / "b.card").write_text("{}")
    (tmp_path / "b.card").chmod(0o600)
    with pytest.raises(InvalidConfiguration, match="no card"):
        load_card(tmp_path / "b.card")
    with pytest.raises(InvalidConfiguration, match="No such file"):
        load_card(tmp_path / "c.card")
    with pytest.raises(InvalidConfiguration, match="exists"):
        Authority.init(tmp_path / "authority.json")


def test_an_authority_remembers_and_revokes(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    host = Security(authority.issue("host-1", CardRole.HOST))
    authority.issue("alice", CardRole.CLIENT)
    authority.issue("alice", CardRole.CLIENT)
    authority.admit("plain", KeyPair.new().public, [Grant(Right.PUBLISH, "q")])
    assert authority.revoke("alice") == 2
    with pytest.raises(CallError):
        authority.revoke("alice")
    again = Authority.load(authority.path)
    assert [(one.name, one.revoked) for one in again.issued] == [
        ("host-1", False), ("alice", True), ("alice", True), ("plain", False),
    ]  # fmt: skip
    assert host.take(again.access_list())
    assert host.access.version == 2
    assert (len(host.access.revoked), len(host.access.admitted)) == (2, 1)
    other = Authority.init(tmp_path / "other.json")
    with pytest.raises(AccessDenied, match="another authority"):
        host.take(other.access_list())


def test_servers_keep_the_key_before(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    before = authority.server_key()
    authority.rotate_servers()
    file = authority.issue("host-1", CardRole.HOST)
    assert authority.server_key() != before
    assert len(file.servers) == 2
