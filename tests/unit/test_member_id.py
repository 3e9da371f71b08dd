"""Ids that only their owner can use: drawn ones, and those of named producers."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from roq.errors import AccessDenied
from roq.ids import ID_MIN
from roq.runtime.security import Security
from roq.tools.authority import Authority
from roq.wire.card import Card, CardRole, Grant, Right
from roq.wire.member_id import NONCE_BYTES, SEAL_BYTES, MemberId, drawn_id, is_proved, seal_grant

SECRETS = (b"s" * 32, b"t" * 32)
NONCE = bytes(range(NONCE_BYTES))
DRAWN = MemberId(drawn_id("alice", NONCE), NONCE)
GRANTED = MemberId(9, seal_grant(SECRETS[0], "orders", 9, "alice"))
FOR_OTHERS = list(itertools.product((DRAWN, GRANTED), ("bob", "", "alice\0"), ("orders", "other")))


def test_the_hash_is_the_documented_one() -> None:
    digest = hashlib.sha256(b"roq member id\0" + b"alice" + b"\0" + NONCE).digest()
    assert DRAWN.id == int.from_bytes(digest[:8], "little")


def test_a_drawn_id_is_its_names_in_every_queue() -> None:
    assert is_proved(DRAWN, "orders", "alice", SECRETS)
    assert is_proved(DRAWN, "other", "alice", ())


def test_a_granted_id_is_that_names_in_that_queue_as_long_as_the_secret_is_known() -> None:
    assert is_proved(GRANTED, "orders", "alice", SECRETS)
    assert is_proved(GRANTED, "orders", "alice", SECRETS[::-1])
    assert not is_proved(GRANTED, "other", "alice", SECRETS)
    assert not is_proved(GRANTED, "orders", "alice", SECRETS[1:])
    assert len(GRANTED.proof) == SEAL_BYTES != NONCE_BYTES


@pytest.mark.parametrize(("member", "name", "queue"), FOR_OTHERS)
def test_it_is_nobody_elses(member: MemberId, name: str, queue: str) -> None:
    assert not is_proved(member, queue, name, SECRETS)


@given(st.sampled_from([DRAWN, GRANTED]), st.integers(0, 2**64 - 1), st.binary(max_size=40))
def test_no_other_id_and_no_other_proof(member: MemberId, id: int, proof: bytes) -> None:
    if id != member.id:
        assert not is_proved(MemberId(id, member.proof), "orders", "alice", SECRETS)
    if proof != member.proof:
        assert not is_proved(MemberId(member.id, proof), "orders", "alice", SECRETS)


def test_ids_of_exchange_and_monitor_are_nobodys() -> None:
    for id in range(ID_MIN):
        assert not is_proved(MemberId(id, seal_grant(SECRETS[0], "orders", id, "alice")), "orders", "alice", SECRETS)


def test_parts_of_a_grant_do_not_run_together() -> None:
    """The name of a queue has no NUL, as check_name says."""
    assert seal_grant(SECRETS[0], "ab", 9, "c") != seal_grant(SECRETS[0], "a", 9, "bc")


def test_a_card_that_is_renewed_keeps_its_ids_and_those_of_hosts_are_not_asked_for(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    host = Security(authority.issue("host-1", CardRole.HOST))

    def card(name: str) -> Security:
        return Security(authority.issue(name, CardRole.CLIENT, [Grant(Right.PUBLISH, "*")]))

    alice, again, bob = card("alice"), card("alice"), card("bob")
    drawn, granted = alice.draw_member_id(), MemberId(9, host.seal_grant("q", 9, alice.card))
    assert drawn != alice.draw_member_id()
    for member in (drawn, granted):
        host.check_member(again.card, "q", member)
        with pytest.raises(AccessDenied, match=f"bob did not prove that the id {member.id:x} is its own"):
            host.check_member(bob.card, "q", member)
    host.check_member(Card("id", "host-2", CardRole.HOST, b"k" * 32, (), 0.0, 2e9), "q", MemberId(5))
