"""A policy on its way: what version 0.1 gets of it, what everybody else does, and what a later version may add."""

from __future__ import annotations

import msgspec
import pytest

from roq.errors import InvalidPolicy
from roq.wire.assignment import ProcessKind, ProcessSpec, QueueRecord, QueueSettings, from_json, to_json
from roq.wire.gcm import PolicyInfo, QueueInfo
from roq.wire.kpi import ExchangeKpi, GroupKpi, QueueKpi, decode, encode, from_json_line
from roq.wire.policy import (
    NEWER,
    Bounds,
    ExchangeRule,
    GroupRule,
    HostRule,
    Policy,
    QueueRule,
    TargetRule,
    joined,
    policy_from_toml,
    split,
)

OLD = Policy(ExchangeRule(1.0, 2.0), HostRule(0.3, 0.4), QueueRule(5.0, 6.0), bounds=Bounds(2, 9, 7.0, 0.5))
NEW = Policy(
    ExchangeRule(1.0, 2.0),
    HostRule(0.3, 0.4),
    QueueRule(5.0, 6.0, 7.0),
    TargetRule(0.02, 100.0, 10.0),
    GroupRule(1000.0, 60.0, 30.0),
    Bounds(2, 9, 7.0, 0.5, 4.0),
)


class QueueRuleBefore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As version 0.1 has it."""

    max_messages_per_second_per_exchange: float | None = None
    max_publishers_per_exchange: float | None = None


class BoundsBefore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As version 0.1 has it."""

    min_exchanges: int = 1
    max_exchanges: int = 4
    cooldown_seconds: float = 5.0
    hysteresis: float = 0.3


class PolicyBefore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As version 0.1 has it."""

    exchange: ExchangeRule = ExchangeRule()
    host: HostRule = HostRule()
    queue: QueueRuleBefore = QueueRuleBefore()
    bounds: BoundsBefore = BoundsBefore()


class QueueInfoBefore(msgspec.Struct, frozen=True, array_like=True, tag="QueueInfo"):
    """As version 0.1 has it, which every member asks for."""

    record: msgspec.Raw
    monitors: msgspec.Raw
    ready: bool
    policy: PolicyBefore


class SpecBefore(msgspec.Struct, frozen=True):
    """What of a process's specification matters here."""

    policy: PolicyBefore | None = None


def test_what_is_split_is_joined() -> None:
    for policy in (Policy(), OLD, NEW, Policy(target=TargetRule(0.1)), Policy(bounds=Bounds(credit=0.0))):
        common, rest = split(policy)
        assert joined(common, rest) == policy
        assert msgspec.convert(msgspec.to_builtins(common), PolicyBefore)
    assert split(OLD) == (OLD, ())
    assert dict(split(NEW)[1]).keys() == set(NEWER)
    assert split(NEW)[0] == OLD


def test_version_01_reads_what_it_knows_of_an_assignment_and_a_queue() -> None:
    common, rules = split(NEW)
    spec = ProcessSpec(ProcessKind.SCALING, "q", policy=common, rules=rules)
    told = msgspec.json.decode(to_json(spec), type=SpecBefore).policy
    assert told is not None
    assert (told.bounds.max_exchanges, told.queue.max_publishers_per_exchange) == (9, 6.0)
    assert from_json(to_json(spec), ProcessSpec).full_policy == NEW
    record = QueueRecord("q", QueueSettings(), True, "h", 1, {}, 0.0, "t")
    info = msgspec.msgpack.encode(QueueInfo(record, (), True, common, rules))
    assert msgspec.msgpack.decode(info, type=QueueInfoBefore).policy == told
    assert msgspec.msgpack.decode(info, type=QueueInfo).policy == NEW
    assert PolicyInfo(common, rules).policy == NEW


def test_rules_of_a_later_version_are_left_out() -> None:
    assert joined(OLD, (("target.max_cost", 3.0), ("orbit.max_height", 1.0), ("bounds.credit", 1.0))).bounds.credit == 1.0
    assert joined(OLD, (("target.max_cost", 3.0),)) == OLD
    assert ProcessSpec(ProcessKind.SCALING, "q").full_policy == Policy()


def test_which_policies_scale() -> None:
    assert not Policy().scales()
    assert not Policy(group=GroupRule(max_lag_messages=1)).scales()
    assert Policy(group=GroupRule(max_lag_messages=1)).watches_groups()
    assert Policy(target=TargetRule(0.1)).scales()
    assert not Policy(target=TargetRule(0.1)).watches_groups()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[target]\nmax_latency_p99_seconds = 0", "target.max_latency_p99_seconds must be a positive number, got 0"),
        ("[group]\nmax_lag_messages = -1", "group.max_lag_messages must be a positive number, got -1"),
        ("[bounds]\ncredit = -1", "bounds.credit is not negative, got -1"),
        ("[bounds]\ncredit = inf", "bounds.credit is not negative, got inf"),
        ("[target]\nmax_latency_p90_seconds = 1", "unknown field `max_latency_p90_seconds`"),
    ],
)
def test_nonsense_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(InvalidPolicy, match=reason):
        policy_from_toml(text)


def test_records_of_before_have_no_groups_and_are_read() -> None:
    exchange = ExchangeKpi("x", "h", "active", 0, 0.0, 0.0, 0.0, 0.0, 0)
    kpi = QueueKpi("q", 1.0, 1, 0.0, 0.0, 0.0, 0, (exchange,), (), (), ())
    before = msgspec.to_builtins(kpi)
    del before["groups"]
    assert decode(msgspec.msgpack.encode(before)) == kpi
    assert from_json_line(msgspec.json.encode(before)) == kpi
    with_groups = msgspec.structs.replace(kpi, groups=(GroupKpi("billing", 3, 7, 1.5, 0.5),))
    assert decode(encode(with_groups)) == with_groups
