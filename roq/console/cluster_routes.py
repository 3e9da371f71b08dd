"""The cluster as a whole: overview, events, hosts, stores, copies, shuffles, ZooKeeper, cards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from roq.cli.doctor_cluster import check_zookeeper
from roq.cli.finding import Finding, Severity
from roq.cli.shuffle import ShuffleRow, shuffle_row
from roq.client.overview import HostRow, host_rows
from roq.console.answers import QUIET, QUIET_SECONDS, EventStream, answer, done, event, gives, streams
from roq.console.context import Reader, Visit, Writer, still_good
from roq.console.hub import LiveListener
from roq.console.session_routes import RightRow
from roq.console.stores import StoreRow
from roq.console.summary import ClusterSummary, summarize
from roq.coordination.link import parse_address
from roq.coordination.locate import read_election
from roq.errors import FrameError, HostNotFound, IncompatibleVersion, RoqError, ShuffleNotFound, Unavailable
from roq.ids import new_token
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.tools.authority import Authority
from roq.wire import gcm, hcm
from roq.wire.access import GetAccess
from roq.wire.assignment import RunningProcess
from roq.wire.card import Card, Grant

S = TypeVar("S", bound=msgspec.Struct)
HOST_SECONDS = 3.0
ELECTION_SECONDS = 3.0
HCM_NAME = "hcm"
router = APIRouter()


class HostCapacity(msgspec.Struct, frozen=True):
    """time: the host's clock, Unix seconds. Bytes; -1: an older HCM does not tell."""

    time: float
    version: str
    memory_bytes: int
    disk_free_bytes: int


class ShownHost(msgspec.Struct, frozen=True):
    """A host and what runs there. capacity: None if its HCM does not answer; problem: why."""

    host: HostRow
    processes: tuple[RunningProcess, ...]
    capacity: HostCapacity | None
    problem: str


class LogTail(msgspec.Struct, frozen=True):
    """The last lines of a log. size: bytes of all of it; bytes: of text. Lines of RoQ's processes are JSON."""

    host: str
    process: str
    size: int
    bytes: int
    text: str


class ClusterHealth(msgspec.Struct, frozen=True):
    """What `roq doctor` finds out about the cluster. time: Unix seconds."""

    time: float
    healthy: bool
    findings: tuple[Finding, ...]


class ZooKeeperServer(msgspec.Struct, frozen=True):
    """One server, and what it says of itself."""

    server: str
    verdict: Severity
    found: str
    advice: str


class ZooKeeperView(msgspec.Struct, frozen=True):
    """leader: address of the leading GCM, "" if none; candidates: all GCMs in the election, the leader first."""

    servers: tuple[ZooKeeperServer, ...]
    chroot: str
    leader: str
    epoch: int
    candidates: tuple[str, ...]


class CardRow(msgspec.Struct, frozen=True):
    """A card, without any key. state: "", revoked, or by key (its holder can't show it). signed_in: here, now."""

    id: str
    name: str
    role: str
    rights: tuple[RightRow, ...]
    expires: float
    state: str
    signed_in: bool


class AccessView(msgspec.Struct, frozen=True):
    """security: whether the cluster takes only who shows a card. authority: whether all cards are listed; note: which are."""

    security: bool
    authority: bool
    cards: tuple[CardRow, ...]
    note: str


# --- overview and events --------------------------------------------------------------------------------------------------


@router.get("/v1/overview", responses=gives(ClusterSummary, "The cluster in a few numbers"))
async def show_overview(visit: Reader) -> Response:
    """What there is, what does not work, and rates of all queues as soon as they are known."""
    visit.may(gcm.GetCluster())
    view = await visit.source.view()
    visit.console.hub.want()
    return answer(summarize(view, visit.source.live))


@router.get("/v1/events", response_class=Response, responses=streams("overview, cluster, unreachable, reachable, cut"))
async def stream_events(visit: Reader) -> Response:
    """What happens, as it does: server-sent events."""
    visit.may(gcm.GetCluster())
    return EventStream(_events(visit), visit.console.streams)


async def _events(visit: Visit) -> AsyncGenerator[bytes, None]:
    listener = LiveListener(lambda: still_good(visit.console, visit.person, visit.token))
    visit.console.hub.add(listener)
    try:
        yield QUIET
        while True:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    name, data = await listener.line.get()
            except TimeoutError:
                yield QUIET
                continue
            yield event(name, data)
            if name == "cut":
                return
    finally:
        visit.console.hub.remove(listener)


# --- hosts ----------------------------------------------------------------------------------------------------------------


@router.get("/v1/hosts", responses=gives(list[HostRow], "All hosts"))
async def list_hosts(visit: Reader) -> Response:
    """By name, as `roq host ls --json`."""
    visit.may(gcm.ListHosts())
    return answer(host_rows((await visit.source.view()).hosts))


def host_of(view: gcm.ClusterView, name: str) -> gcm.HostInfo:
    """Raises HostNotFound."""
    found = next((info for info in view.hosts if info.host == name), None)
    if found is None:
        raise HostNotFound(f"no host {name!r} is in the cluster")
    return found


async def ask_host(info: gcm.HostInfo, request: msgspec.Struct, expect: type[S]) -> S:
    """Its HCM. Raises TemporaryError."""
    client = RpcClient(f"tcp://{info.address}:{info.port}", hcm.Reply, on_disconnect=OnDisconnect.FAIL)
    try:
        return await client.request(request, expect, HOST_SECONDS)
    finally:
        client.close()


@router.get("/v1/hosts/{host}", responses=gives(ShownHost, "A host and what runs there"))
async def show_host(visit: Reader, host: str) -> Response:
    """Its processes, and what its HCM says of itself."""
    visit.may(gcm.ListHosts())
    info = host_of(await visit.source.view(), host)
    capacity, problem = None, ""
    try:
        told = await ask_host(info, hcm.GetCapacity(), hcm.Capacity)
        capacity = HostCapacity(told.time, told.version, told.memory_bytes, told.disk_free_bytes)
    except RoqError as error:
        problem = str(error)
    processes = info.report.processes if info.report is not None else ()
    return answer(ShownHost(host_rows([info])[0], processes, capacity, problem))


@router.get("/v1/hosts/{host}/logs", responses=gives(LogTail, "The last lines"))
async def show_log(
    visit: Reader, host: str, process: str, bytes: Annotated[int, Query(ge=1, le=hcm.LOG_BYTES_MAX)] = 65536
) -> Response:
    """Of a process by its name, `hcm` for the HCM itself. The host's HCM reads them when it is asked."""
    visit.may(gcm.ListHosts())
    info = host_of(await visit.source.view(), host)
    if not info.alive:
        raise Unavailable(f"host {host} is gone: nobody there can read a log")
    try:
        found = await ask_host(info, hcm.GetLog("" if process == HCM_NAME else process, bytes), hcm.LogEnd)
    except FrameError:
        raise IncompatibleVersion(f"RoQ on {host} is older and serves no logs: read them there") from None
    return answer(LogTail(host, process, found.size, len(found.data), found.data.decode(errors="replace")))


async def _set_cordoned(visit: Visit, host: str, *, cordoned: bool) -> Response:
    asked = gcm.DrainHost(host, cordoned, new_token())
    with visit.acts(asked):
        visit.may(asked)
        await visit.source.change(visit.source.cluster.cordon_host(host, cordoned))
    return done()


@router.post("/v1/hosts/{host}/cordon", responses=gives(None, "Nothing new is placed there", 204), status_code=204)
async def cordon(visit: Writer, host: str) -> Response:
    """Place nothing new on a host; what runs there goes on."""
    return await _set_cordoned(visit, host, cordoned=True)


@router.post("/v1/hosts/{host}/uncordon", responses=gives(None, "It takes part again", 204), status_code=204)
async def uncordon(visit: Writer, host: str) -> Response:
    """Let a host take part again."""
    return await _set_cordoned(visit, host, cordoned=False)


# --- stores, health, ZooKeeper --------------------------------------------------------------------------------------------


@router.get("/v1/stores", responses=gives(list[StoreRow], "The store of each host"))
async def list_stores(visit: Reader) -> Response:
    """By host: what its store keeps and how much room it has, or why it does not answer. All are asked, for 6 s at most."""
    visit.may(gcm.GetCluster())
    return answer(await visit.source.stores())


@router.get("/v1/doctor", responses=gives(ClusterHealth, "What is wrong, and what to do about it"))
async def show_health(visit: Reader) -> Response:
    """As `roq doctor` has it of the cluster: ZooKeeper, leader, hosts, clocks, disks, copies. Takes seconds; it is there when
    nothing else is."""
    visit.may(gcm.GetCluster())
    found = await visit.source.findings()
    healthy = all(one.verdict is not Severity.WRONG for one in found)
    return answer(ClusterHealth(time.time(), healthy, tuple(found)))


@router.get("/v1/zookeeper", responses=gives(ZooKeeperView, "ZooKeeper, and who leads"))
async def show_zookeeper(visit: Reader) -> Response:
    """Each of its servers, and the GCMs in the election."""
    visit.may(gcm.GetCluster())
    parsed = parse_address(visit.source.address)
    servers = parsed.hosts.split(",")
    findings, candidates = await asyncio.gather(
        asyncio.gather(*map(check_zookeeper, servers)), _candidates(visit.source.address)
    )
    leader, epoch = "", 0
    try:
        view = await visit.source.view()
        leader, epoch = view.leader, view.epoch
    except Unavailable:  # what ZooKeeper says is wanted just then
        pass
    rows = (ZooKeeperServer(server, one.verdict, one.found, one.advice) for server, one in zip(servers, findings, strict=True))
    return answer(ZooKeeperView(tuple(rows), parsed.chroot, leader, epoch, tuple(candidates)))


async def _candidates(address: str) -> Sequence[str]:
    try:
        return await read_election(address, ELECTION_SECONDS)
    except RoqError:
        return ()


# --- shuffles -------------------------------------------------------------------------------------------------------------


@router.get("/v1/shuffles", responses=gives(list[ShuffleRow], "All shuffles"))
async def list_shuffles(visit: Reader) -> Response:
    """As `roq shuffle ls --json`: without their ranges."""
    visit.may(gcm.ListShuffles())
    found = (await visit.source.ask(gcm.ListShuffles(), gcm.ShuffleList)).shuffles
    return answer([shuffle_row(msgspec.structs.replace(one, ranges=(), former=())) for one in found])


@router.get("/v1/shuffles/{name}", responses=gives(ShuffleRow, "A shuffle and its ranges"))
async def show_shuffle(visit: Reader, name: str) -> Response:
    """As `roq shuffle show --json`."""
    visit.may(gcm.DescribeShuffle(name))
    found = await visit.source.ask(gcm.DescribeShuffle(name), gcm.ShuffleInfo)
    if found.description.name != name:
        raise ShuffleNotFound(f"no shuffle {name!r}")
    return answer(shuffle_row(found.description))


# --- cards ----------------------------------------------------------------------------------------------------------------


@router.get("/v1/access", responses=gives(AccessView, "Cards: names and rights, never keys"))
async def show_access(visit: Reader) -> Response:
    """Who may do what, as `roq access ls`, where the console was given the authority's file; else who is signed in here."""
    visit.may(GetAccess())
    security, path = visit.source.security, visit.console.settings.authority
    here = visit.console.sessions.cards()
    if security is None:
        note = "this cluster has no security: whoever reaches it may do everything"
        return answer(AccessView(security=False, authority=False, cards=(), note=note))
    if path is not None:
        ids = {card.id for card in here}
        issued = await asyncio.to_thread(lambda: Authority.load(path).issued)
        cards = tuple(
            CardRow(
                *(one.id, one.name, str(one.role), rights_of(one.grants), one.expires),
                "revoked" if one.revoked else "by key" if one.admitted else "",
                one.id in ids,
            )
            for one in issued
        )
        return answer(AccessView(security=True, authority=True, cards=cards, note="all cards that the authority signed"))
    note = "cards that are signed in here, and the console's own; `roq console --authority FILE` lists all that were signed"
    known = {card.id: card_row(card, security.access.revoked) for card in (security.card, *here)}
    return answer(AccessView(security=True, authority=False, cards=tuple(known.values()), note=note))


def rights_of(grants: Sequence[Grant]) -> tuple[RightRow, ...]:
    """For JSON."""
    return tuple(RightRow(str(grant.right), grant.names) for grant in grants)


def card_row(card: Card, revoked: Sequence[str]) -> CardRow:
    """One of those who are signed in."""
    state = "revoked" if card.id in revoked else ""
    return CardRow(card.id, card.name, str(card.role), rights_of(card.grants), card.expires, state, signed_in=True)
