"""Who serves requests, and which callers want to know: the Monitor's list of responders. Pure: no IO, no clock.

A subscriber with a service is listed once it says that it serves: it knows that it is ready, and what is sent to it arrives
(what came before it knew was not meant for it). It is doubted, so that callers take others first, while its connection is gone,
it has been silent for a while, or an Exchange may carry messages past it; and taken out when it serves no more, has left, or
has been away for longer than one that lives would be. Callers have its requests fail then. So an incomplete list, of a Monitor
to which not everybody has come back yet, takes nobody out: it says that it is incomplete.

Callers are subscribers that report which version of the list they have. They are told each change at once, and again with a
report that names another version. Members that neither serve nor call cost nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from roq.errors import Overloaded
from roq.pubsub.monitor.membership import PUBLISHER_SILENT_SECONDS, Membership
from roq.pubsub.monitor.records import Instruction, Notify
from roq.pubsub.subscription import check_service
from roq.wire import monitor as wire
from roq.wire.requests import check_filters

TOLD_AT_ONCE = 20_000  # entries that one change may send to all callers together; more goes with their next reports
DOUBTED_SECONDS = 2.5  # without a report: two were missed
LIST_BYTES_MAX = 1024 * 1024  # every caller gets all of it, in one message
TEXT_BYTES = 3  # of a group or filter beside its characters
ENTRY_BYTES = 24  # of one server beside its group and filters, at most
RETURN_SECONDS = 1.5  # one that lives has reported by then, over another connection if one broke
GONE_SECONDS = PUBLISHER_SILENT_SECONDS  # connected and silent: its loop may be busy for that long


class ResponderList:
    """Of one queue, beside its membership."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._services: dict[int, wire.Service] = {}  # of subscribers that joined with one
        self._bytes = 0  # of these, LIST_BYTES_MAX at most
        self._listed: dict[int, wire.ResponderView] = {}  # of some of these
        self._callers = set[int]()
        self._version = 1
        self._complete = False

    def notice(self) -> wire.Responders:
        """As it is now."""
        return wire.Responders(self._membership.term, self._version, self._complete, tuple(self._listed.values()))

    def joins(self, request: wire.JoinSubscriber) -> None:
        """A subscriber is about to join, again perhaps. It is listed with a report. Raises what check_service and check_filters
        raise: callers could not read it; Overloaded: the list is full."""
        if request.service is None:
            return
        check_service(request.service)
        check_filters(request.service.topics)
        more, known = _entry_bytes(request.service), self._services.get(request.subscriber)
        less = 0 if known is None else _entry_bytes(known)
        if self._bytes + more - less > LIST_BYTES_MAX:
            raise Overloaded(f"the servers of this queue fill their list of {LIST_BYTES_MAX} bytes: use fewer, shorter filters")
        self._bytes += more - less
        self._services[request.subscriber] = request.service

    def reported(self, report: wire.SubscriberReport, now: float) -> list[Instruction]:
        """A subscriber has reported, and the membership knows."""
        member, record = report.subscriber, self._membership.subscribers.get(report.subscriber)
        if record is None:
            return []
        changed = False
        if member in self._services:
            changed = (
                self._list(member, doubted=not record.ready) if report.serving else self._listed.pop(member, None) is not None
            )
        if report.responders >= 0:
            self._callers.add(member)
        if changed or self._is_complete(now):
            return self._tell()
        stale = report.responders >= 0 and report.responders != self._version
        return self._tell_those([member]) if stale else []

    def left(self, member: int, now: float) -> list[Instruction]:
        """It has said good-bye."""
        changed = self._forget(member)
        return self._tell() if changed or self._is_complete(now) else []

    def tick(self, connected: Callable[[bytes], bool], now: float) -> list[Instruction]:
        """Once a second: who is doubted, who is gone, whether it is complete. connected(peer): its connection is there."""
        changed = self._is_complete(now)
        subscribers = self._membership.subscribers
        for member in [one for one in (*self._services, *self._callers) if one not in subscribers]:
            changed |= self._forget(member)
        for member in list(self._listed):
            record = subscribers[member]
            silent, here = now - record.last_report, connected(record.peer)
            if silent > (GONE_SECONDS if here else RETURN_SECONDS):
                changed |= self._listed.pop(member, None) is not None
            else:
                changed |= self._list(member, doubted=not here or silent > DOUBTED_SECONDS or not record.ready)
        return self._tell() if changed else []

    def _list(self, member: int, *, doubted: bool) -> bool:
        """Whether that is new."""
        known, view = self._listed.get(member), wire.ResponderView(member, self._services[member], doubted)
        self._listed[member] = view
        return view != known

    def _forget(self, member: int) -> bool:
        if (service := self._services.pop(member, None)) is not None:
            self._bytes -= _entry_bytes(service)
        self._callers.discard(member)
        return self._listed.pop(member, None) is not None

    def _is_complete(self, now: float) -> bool:
        """Whether that is new."""
        before, self._complete = self._complete, self._complete or self._membership.all_back(now)
        return self._complete and not before

    def _tell(self) -> list[Instruction]:
        """Something has changed."""
        self._version += 1
        too_much = len(self._listed) * len(self._callers) > TOLD_AT_ONCE
        return [] if too_much else self._tell_those(self._callers)

    def _tell_those(self, callers: Iterable[int]) -> list[Instruction]:
        subscribers, notice = self._membership.subscribers, self.notice()
        return [Notify(subscribers[one].peer, notice) for one in callers if one in subscribers]

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self._listed.keys() <= self._services.keys(), "one is listed without a service"
        assert self._bytes == sum(map(_entry_bytes, self._services.values())) <= LIST_BYTES_MAX, "bytes are miscounted"


def _entry_bytes(service: wire.Service) -> int:
    return ENTRY_BYTES + sum(len(text.encode()) + TEXT_BYTES for text in (service.group, *service.topics))
