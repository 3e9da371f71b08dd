"""Every request of every conversation says which right it needs, or is for the cluster's own processes; the rest is denied."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from roq.errors import AccessDenied, CallError, InvalidConfiguration
from roq.runtime import audit, security
from roq.runtime.audit import acted, refused, turned_away
from roq.runtime.observe import Counters, Refusals
from roq.runtime.security import Security, load_card, members_only, write_secret
from roq.tools.authority import Authority
from roq.wire import gcm, hcm, master, monitor, rights, shuffle, store
from roq.wire.access import SetAccess
from roq.wire.card import CLOCK_SECONDS, AccessList, Card, CardRole, Grant, Right, SecurityMode, new_card, sign
from roq.wire.curve import KeyPair

INSIDE = {  # what no client may ask, with any right
    *(store.OpenSegment, store.FenceLog, store.Recover, store.Holes, store.Compare, store.CopySegment),
    *(store.DeleteSegment, store.ListSegments, store.CopyBlob, store.DeleteBlob, store.ListBlobs, store.Add),
    *(shuffle.StorePieces, shuffle.FetchInterval, shuffle.KeepIntervals, shuffle.ForgetShuffle, shuffle.TableChanged),
    *(gcm.ReportRuns, monitor.ExchangeReport, monitor.PathsFenced, monitor.RecordDecision),
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


def test_who_records_a_queue_and_who_reads_its_tapes() -> None:
    allow = rights.for_names(rights.GCM)
    assert rights.ADMINISTRATIVE & {gcm.RecordQueue, gcm.DescribeTapes} == {gcm.RecordQueue}
    allow(card(Grant(Right.ADMIN, "orders")), gcm.RecordQueue("orders", None, "t"))
    for right in (Right.SUBSCRIBE, Right.READ, Right.DESCRIBE):
        allow(card(Grant(right, "orders")), gcm.DescribeTapes("orders"))
        with pytest.raises(AccessDenied, match="admin"):
            allow(card(Grant(right, "*")), gcm.RecordQueue("orders", None, "t"))
        with pytest.raises(AccessDenied, match="the right `subscribe` or `read` or `describe` to 'bills'"):
            allow(card(Grant(right, "orders")), gcm.DescribeTapes("bills"))
    with pytest.raises(AccessDenied):
        allow(card(Grant(Right.PUBLISH, "*")), gcm.DescribeTapes("orders"))
    allow(card(role=CardRole.HOST, name="host-1"), gcm.DescribeTapes("orders"))  # for the master of a group
    with pytest.raises(AccessDenied, match="no administrator"):
        allow(card(role=CardRole.HOST, name="host-1"), gcm.RecordQueue("orders", None, "t"))


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
    allow = rights.allow_at_store()
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


def test_a_servers_key_rotates_without_a_gap(tmp_path: Path) -> None:
    """A host that has the new card meets servers that have not, and the other way round; programs come last."""
    authority = Authority.init(tmp_path / "authority.json")
    before = [Security(authority.issue(f"host-{number}", CardRole.HOST)) for number in (1, 2)]
    program = Security(authority.issue("program", CardRole.CLIENT))
    authority.rotate()
    after = Security(authority.issue("host-1", CardRole.HOST))
    for client, server in ((after, before[1]), (before[1], after), (program, before[1]), (program, after)):
        assert meets(client, server)
    late = Security(authority.issue("late", CardRole.CLIENT))
    assert meets(late, after)
    with pytest.raises(AccessDenied, match="another cluster"):
        meets(late, before[1])


def meets(client: Security, server: Security) -> bool:
    seen = list[Card]()
    here, there = client.client(b"DEALER", 1000), server.server(b"ROUTER", 1000, seen.append)
    for _ in range(3):
        for source, target in ((here, there), (there, here)):
            data = b"".join(source.to_send)
            source.to_send.clear()
            if data:
                target.feed(data)
    return here.ready and there.ready and seen == [client.card]


def test_a_card_with_many_rights_gets_in_and_one_with_too_many_is_not_made(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    host = Security(authority.issue("host-1", CardRole.HOST))
    grants = [Grant(Right.SUBSCRIBE, f"{number}-{'x' * 90}") for number in range(100)]
    assert meets(Security(authority.issue("many", CardRole.CLIENT, grants)), host)
    with pytest.raises(CallError, match="fewer or shorter"):
        authority.issue("more", CardRole.CLIENT, [Grant(one.right, one.names * 3) for one in grants])


def test_a_follower_knows_a_shuffle_by_its_id(tmp_path: Path) -> None:
    allow = rights.for_shuffles({"id-1": "mine", "id-2": "theirs"}.get)
    reads = card(Grant(Right.SHUFFLE_READ, "mine"), Grant(Right.DESCRIBE, "mine"))
    allow(reads, shuffle.TellSpec("id-1"))
    for request in (shuffle.TellSpec("id-2"), shuffle.DescribeFollower()):
        with pytest.raises(AccessDenied):
            allow(reads, request)
    writes = card(Grant(Right.SHUFFLE_WRITE, "mine"))
    spec = shuffle.Spec((), ())  # type: ignore[arg-type]
    allow(writes, shuffle.OpenAttempt("id-3", "mine", spec, 0, "a", "w"))
    for written in (
        shuffle.OpenAttempt("id-2", "mine", spec, 0, "a", "w"),
        shuffle.OpenAttempt("id-3", "other", spec, 0, "a", "w"),
        shuffle.AbandonAttempt("id-2", 0, "a"),
    ):
        with pytest.raises(AccessDenied):
            allow(writes, written)


def test_a_hosts_card_is_no_administrators() -> None:
    host = card(role=CardRole.HOST, name="host-1")
    allow = rights.for_names(rights.GCM)
    allow(host, gcm.CreateExchange("orders", "t"))
    for request in (gcm.RemoveQueue("orders", "t"), gcm.DrainHost("host-2", True, "t"), gcm.GetCluster(), hcm.ShutdownHost()):
        with pytest.raises(AccessDenied, match="no administrator"):
            allow(host, request)


def test_a_card_that_cannot_be_read_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_process", security._ProcessCard())
    monkeypatch.setenv("ROQ_CARD", str(tmp_path / "none.card"))
    for _ in range(2):
        with pytest.raises(InvalidConfiguration):
            security.process_security()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Keeps a new card for a cluster of this address; its id."""
    monkeypatch.setattr(security, "_process", security._ProcessCard())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def keep(cluster: str) -> str:
        path = security.known_card(cluster)
        write_secret(path, Authority.init(tmp_path / f"{time.time_ns()}.json").issue("owner", CardRole.CLIENT))
        return load_card(path).card.id

    return keep


def used() -> str | None:
    now = security.process_security()
    return now.card.id if now is not None else None


def test_a_program_uses_the_card_that_is_kept_for_its_cluster(kept: Callable[[str], str]) -> None:
    """The one of now: a cluster at the same address may be another one, and the next one may have none."""
    first = kept("a:1/RoQ")
    security.enter_cluster("a:1/RoQ")
    assert used() == first
    second = kept("a:1/RoQ")
    security.enter_cluster("a:1/RoQ")
    assert used() == second
    for _ in range(2):
        security.leave_cluster("a:1/RoQ")
    security.enter_cluster("b:1/RoQ")
    assert used() is None


def test_cards_of_two_clusters_at_once_are_refused_with_words(kept: Callable[[str], str]) -> None:
    first = kept("a:1/RoQ")
    kept("b:1/RoQ")
    security.enter_cluster("a:1/RoQ")
    for other in ("b:1/RoQ", "none:1/RoQ"):
        with pytest.raises(InvalidConfiguration, match="uses that of a:1/RoQ"):
            security.enter_cluster(other)
    assert used() == first
    security.leave_cluster("a:1/RoQ")
    security.enter_cluster("b:1/RoQ")
    assert used() not in (None, first)


def test_clients_of_two_threads_decide_one_after_the_other(kept: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both would find no other cluster, and each would take its card."""
    for cluster in ("a:1/RoQ", "b:1/RoQ"):
        kept(cluster)
    both = threading.Barrier(2)

    class Slow(Counter[str]):
        def __iter__(self) -> Iterator[str]:
            found = list(super().__iter__())
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            return iter(found)

    security._process.clusters = Slow()
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(security.enter_cluster, cluster) for cluster in ("a:1/RoQ", "b:1/RoQ")]
    assert sorted(type(end.exception()) is InvalidConfiguration for end in ends) == [False, True]


def test_who_was_given_a_card_or_none_looks_for_none(kept: Callable[[str], str], tmp_path: Path) -> None:
    given = tmp_path / "given.card"
    write_secret(given, Authority.init(tmp_path / "given.json").issue("alice", CardRole.CLIENT))
    kept("a:1/RoQ")
    security.use_daemon_card(None, SecurityMode.NONE, CardRole.HOST)
    security.enter_cluster("a:1/RoQ")
    assert used() is None
    security._process = security._ProcessCard()
    security.use_card(given)
    security.enter_cluster("a:1/RoQ")
    assert used() == load_card(given).card.id


def test_without_a_home_nothing_is_kept(kept: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept("a:1/RoQ")
    with monkeypatch.context() as patched:
        patched.setattr(security, "known_card", Mock(side_effect=PermissionError(13, "no")))
        security.enter_cluster("a:1/RoQ")
        assert used() is None
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    security.enter_cluster("a:1/RoQ")
    assert used() is None


def test_one_bad_card_of_an_access_list_keeps_nobody_in(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    host = Security(authority.issue("host-1", CardRole.HOST))
    bad = AccessList(1, ("revoked",), (b"no card",))
    assert host.take(sign(bad, base64.b64decode(authority._file.signing[0][1])))
    assert host.access == bad


def test_cards_signed_at_the_same_time_are_all_known(tmp_path: Path) -> None:
    first = Authority.init(tmp_path / "authority.json")
    second = Authority.load(first.path)
    first.issue("one", CardRole.CLIENT)
    second.issue("two", CardRole.CLIENT)
    first.revoke("two")
    assert [(one.name, one.revoked) for one in Authority.load(first.path).issued] == [("one", False), ("two", True)]


def test_what_changes_the_cluster_is_written_down_with_who_did_it(caplog: pytest.LogCaptureFixture) -> None:
    changes = {gcm.RemoveQueue, gcm.DrainHost, SetAccess, hcm.ShutdownHost, monitor.Move, master.PurgeQueue}
    assert changes <= rights.ADMINISTRATIVE
    harmless = {gcm.DescribeQueue, monitor.JoinPublisher, monitor.AwaitExchange, master.Put, master.Hello, hcm.GetProcesses}
    assert not harmless & rights.ADMINISTRATIVE
    with caplog.at_level("INFO", "roq.audit"):
        acted(card(), gcm.DrainHost("host-1", True, "t"))
        acted(card(), gcm.RemoveQueue("orders", "t"), "QueueNotFound")
        acted(None, SetAccess(b"secret"))
    assert [record.getMessage() for record in caplog.records] == [
        "administrative request: who=alice, request=DrainHost, host=host-1, draining=True",
        "administrative request: who=alice, request=RemoveQueue, queue=orders, failure=QueueNotFound",
        "administrative request: who=anybody, request=SetAccess",
    ]


def test_refused_connections_can_not_flood_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    monkeypatch.setattr(audit, "_refusals", Refusals(audit.audit, counters))
    for number in range(1000):
        turned_away("no card was shown", number.to_bytes(32, "big"))
    (record,) = caplog.records
    assert record.getMessage() == f"refused input: reason=connection, detail=no card was shown (key {'0' * 16}), total=1"
    assert counters["refused_connection"] == 1000


def test_refused_requests_are_written_down_and_can_not_flood_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "_refusals", Refusals(audit.audit, Counters()))
    for _ in range(1000):
        refused(card(), gcm.RemoveQueue("orders", "t"), AccessDenied("alice needs the right `admin`"))
    refused(None, gcm.DrainHost("host-1", True, "t"), AccessDenied("the connection ended"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "reason=request of alice, detail=request RemoveQueue, queue orders: alice needs the right `admin`" in first
    assert "request of anybody, detail=request DrainHost, host host-1, draining True" in second


def test_the_authoritys_keys_rotate_without_a_gap(tmp_path: Path) -> None:
    """Who has cards of one generation meets those of the next, and takes its access list; not those of the one after."""
    authority = Authority.init(tmp_path / "authority.json")
    admitted = KeyPair.new()
    authority.admit("foreign", admitted.public, [Grant(Right.PUT, "*")])
    authority.issue("gone", CardRole.CLIENT)
    authority.revoke("gone")
    hosts, lists = list[Security](), list[bytes]()
    for number in range(4):
        hosts.append(Security(authority.issue(f"host-{number}", CardRole.HOST)))
        lists.append(authority.access_list())
        authority.rotate()
    for first, second in pairwise(range(4)):
        assert meets(hosts[first], hosts[second])
        assert meets(hosts[second], hosts[first])
        assert hosts[first].take(lists[second])
        assert hosts[first].access.revoked
        assert hosts[first]._card_of(admitted.public, b"").name == "foreign"
        assert hosts[second].checked(lists[first]).version < hosts[second].checked(lists[second]).version
    with pytest.raises(AccessDenied, match="another authority"):
        hosts[3].checked(lists[0])
    for one, other in ((hosts[0], hosts[3]), (hosts[3], hosts[0])):
        with pytest.raises(AccessDenied):
            meets(one, other)
