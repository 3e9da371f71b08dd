"""What `roq upgrade check` says of a cluster. Pure; of a real one: tests/interop/test_upgrade.py."""

from __future__ import annotations

import msgspec
import pytest

from roq.cli.doctor_cluster import CopiesOf, HostsState, HostState
from roq.cli.finding import Finding, Severity
from roq.cli.tree_finding import check_tree_format
from roq.cli.upgrade import check_upgrade
from roq.errors import UnknownFormat
from roq.wire.assignment import Overflow, QueueRecord, QueueSettings, to_json
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo, WorkQueueInfo
from roq.wire.hcm import Capacity
from roq.wire.master import Shortage
from roq.wire.policy import Policy
from roq.wire.recording import Record
from roq.wire.tree_format import FIRST, FORMAT, TreeFormat, check_format, raised, read_format
from roq.wire.work_queue import GroupSource, WorkQueueRecord, WorkQueueSpec

HOSTS = ("a", "b", "c")


def host(name: str, *, alive: bool = True) -> HostInfo:
    return HostInfo(name, "127.0.0.1", 1, alive, False, 0, 8, 0, 0.0, 0.0, None)


def queue(
    name: str,
    exchanges: str = "ab",
    *,
    replication: int = 2,
    overflow: Overflow = Overflow.BLOCK,
    record: Record | None = None,
    running: bool = True,
) -> QueueInfo:
    places = {f"e{number}": place for number, place in enumerate(exchanges)}
    made = QueueRecord(name, QueueSettings(replication, overflow), running, "a", 1, places, 0.0)
    return QueueInfo(msgspec.structs.replace(made, record=record, recorded=record is not None), (), True, Policy())


def work_queue(name: str, standbys: tuple[str, ...] = ("b",), source: GroupSource | None = None) -> WorkQueueInfo:
    spec = WorkQueueSpec("log", 3, 2, source=source)
    return WorkQueueInfo(WorkQueueRecord(name, spec, len(standbys), "a", 1, standbys, 0.0, "t"), (), True)


def answers(*versions: str | None) -> HostsState:
    told = [None if version is None else Capacity(0, 8, 0.0, 0.0, 0, version=version) for version in versions]
    return HostsState([HostState(name, "x", one) for name, one in zip(HOSTS, told, strict=False)], 0)


WELL = ClusterView(1, "g", 0.0, tuple(map(host, HOSTS)), (queue("q"),), (work_queue("w"),))
SAME = answers("0.2.0", "0.2.0", "0.2.0")


def found(view: ClusterView = WELL, hosts: HostsState = SAME, **more: object) -> list[Finding]:
    groups, copies = more.get("groups", ()), more.get("copies", ())
    tree = check_tree_format(more.get("tree", TreeFormat(2, 1, "0.2.0")))  # type: ignore[arg-type]
    return check_upgrade(view, groups, hosts, copies, tree, secured=bool(more.get("secured")))  # type: ignore[arg-type]


def test_a_cluster_that_can_spare_a_host() -> None:
    findings = found(copies=[CopiesOf("work queue w")])
    assert {one.verdict for one in findings} == {Severity.GOOD}
    assert "roq host stop" in findings[-1].found


def replaced(**fields: object) -> ClusterView:
    return msgspec.structs.replace(WELL, **fields)


@pytest.mark.parametrize(
    ("findings", "verdict", "told"),
    [
        (found(replaced(hosts=(host("a"), host("b", alive=False)))), Severity.WRONG, "not there: b"),
        (found(replaced(hosts=(host("a"),))), Severity.WARNING, "there is only one"),
        (found(hosts=answers("0.2.0", None, "0.2.0")), Severity.WRONG, "not reported by b"),
        (found(hosts=answers("", "0.2.0", "0.2.0")), Severity.WARNING, "0.1 on 1 host, 0.2.0 on 2 hosts"),
        (found(copies=[CopiesOf("work queue w", [Shortage("s", 1, 3, ("b",))])]), Severity.WRONG, "1 of 3"),
        (found(copies=[CopiesOf("work queue w", error="no answer")]), Severity.WARNING, "not reported for work queue w"),
        (found(copies=[CopiesOf("work queue w", error="gone", lost=True)]), Severity.WRONG, "gone"),
        (found(replaced(queues=(queue("q", "bb", overflow=Overflow.DROP),))), Severity.WARNING, "q on b"),
        (found(replaced(queues=(queue("q", "c"),))), Severity.WARNING, "q on c"),
        (found(replaced(queues=(queue("q", replication=1),))), Severity.WARNING, "q on a"),
        (found(replaced(work_queues=(work_queue("w", ()),))), Severity.WARNING, "w on a"),
        (found(groups=[work_queue("q@g", (), GroupSource("q"))]), Severity.WARNING, "q@g on a"),
        (found(replaced(queues=(queue("q", record=Record(copies=1)),))), Severity.WARNING, "q"),
    ],
)
def test_what_stands_in_the_way_comes_with_advice(findings: list[Finding], verdict: Severity, told: str) -> None:
    (one,) = [finding for finding in findings if finding.verdict is not Severity.GOOD]
    assert (one.verdict, bool(one.advice)) == (verdict, True)
    assert told in one.found


def test_what_an_old_store_has_is_not_known() -> None:
    short = [CopiesOf("work queue w", [Shortage("s", 1, 2, ("a",))])]
    assert "s: 1 of 2" in found(copies=short)[2].found
    mixed = found(hosts=answers("", "0.2.0", "0.2.0"), copies=short)
    assert [one.subject for one in mixed if one.verdict is Severity.WARNING] == ["Versions", "Copies"]
    assert Severity.WRONG not in {one.verdict for one in mixed}
    nowhere = [CopiesOf("work queue w", [Shortage("s", 1, 2, ())])]
    assert Severity.WRONG in {one.verdict for one in found(hosts=answers("", "0.2.0", "0.2.0"), copies=nowhere)}


def test_a_stopped_queue_waits_for_nobody_and_enough_copies_are_well() -> None:
    stopped = queue("q", "a", replication=1, overflow=Overflow.DROP, running=False)
    kept = queue("r", record=Record(copies=3, ack=2))
    assert {one.verdict for one in found(replaced(queues=(stopped, kept)))} == {Severity.GOOD}


def test_many_names_are_cut() -> None:
    many = tuple(queue(f"q{number}", "c") for number in range(7))
    assert any("and 2 more" in one.found for one in found(replaced(queues=many)))


TARGETED = msgspec.structs.replace(queue("q"), rules=(("target.max_latency_p99_seconds", 0.02),))


@pytest.mark.parametrize(
    ("findings", "told"),
    [
        (found(), "nothing that it does not know"),
        (found(secured=True), "cards"),
        (found(replaced(queues=(queue("q", record=Record(copies=3, ack=2)),))), "recorded queues: q"),
        (found(groups=[work_queue("q@g", source=GroupSource("q"))]), "groups: q@g"),
        (found(replaced(queues=(TARGETED,))), "targets, or other rules of policies that it lacks: q"),
    ],
)
def test_what_the_version_before_does_not_know(findings: list[Finding], told: str) -> None:
    (back,) = [one for one in findings if one.subject == "Back to 0.1"]
    assert told in back.found


# --- the format of ZooKeeper's tree ------------------------------------------------------------------------------------

NEWER = TreeFormat(FORMAT + 1, FORMAT, "0.9.0")  # we know enough of it to lead
TOO_NEW = TreeFormat(FORMAT + 1, FORMAT + 1, "0.9.0")


def test_a_leader_raises_an_older_format_and_leaves_a_newer_one() -> None:
    ours = raised(FIRST, "0.2.0")
    assert (ours.format, ours.version) == (FORMAT, "0.2.0")
    assert raised(ours, "0.2.1") == ours, "the same format is not written again"
    assert raised(NEWER, "0.2.0") == NEWER
    assert raised(TreeFormat(1, FORMAT, "0.9.0"), "0.2.0").reads == FORMAT, "what older leaders must not touch stays"


def test_a_tree_that_we_must_not_lead_is_refused_with_what_to_do() -> None:
    for tree in (FIRST, raised(FIRST, "0.2.0"), NEWER):
        check_format(tree)
    with pytest.raises(UnknownFormat, match=rf"this one knows format {FORMAT}: install version 0.9.0 or newer"):
        check_format(TOO_NEW)


def test_the_node_is_read_as_it_is_written() -> None:
    assert read_format(None) == read_format(b"") == FIRST
    assert read_format(to_json(NEWER)) == NEWER
    with pytest.raises(UnknownFormat, match="damaged"):
        read_format(b"\x00")


def test_the_number_is_shown_and_one_that_we_do_not_know_stands_in_the_way() -> None:
    assert any("format 2, of version 0.2.0" in one.found for one in found())
    [bad] = [one for one in found(tree=TOO_NEW) if one.verdict is Severity.WRONG]
    assert f"only GCMs that know format {FORMAT + 1} lead" in bad.found
    assert "install version 0.9.0" in bad.advice
