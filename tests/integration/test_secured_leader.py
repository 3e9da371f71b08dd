"""A program that one leader did not let in asks who leads, and does not stay with it for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roq.coordination import locate
from roq.coordination.locate import GcmClient
from roq.errors import AccessDenied, CardRevoked
from roq.runtime import security
from roq.runtime.rpc import RpcServer
from roq.runtime.security import Security, write_secret
from roq.tools.authority import Authority
from roq.wire import gcm
from roq.wire.card import CardRole
from tests.harness.cards import as_holder

pytestmark = pytest.mark.quick
LOCAL = "127.0.0.1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.init(tmp_path / "authority.json")


@contextmanager
def leading(made: Security) -> Iterator[RpcServer]:
    """A GCM that answers everybody whom this security lets in."""

    async def handle(peer: bytes, request: gcm.Request) -> gcm.Hosts:
        return gcm.Hosts(())

    before = security._process
    security._process = security._ProcessCard(made, looked=True)
    try:
        server = RpcServer(LOCAL, 0, gcm.Request, handle, allow=lambda card, request: None)
    finally:
        security._process = before
    try:
        yield server
    finally:
        server.close()


async def test_who_was_refused_asks_who_leads(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tmp_path / "alice.card"
    write_secret(card, authority.issue("alice", CardRole.CLIENT))
    gcm_card = authority.issue("gcm-1", CardRole.GCM)
    refusing, letting_in = Security(gcm_card), Security(gcm_card)
    authority.revoke("alice")
    assert refusing.take(authority.access_list())
    with leading(refusing) as first, leading(letting_in) as second:
        leaders = iter([first, second])

        async def named(zookeeper: str, timeout_seconds: float) -> gcm.LeaderAddress:
            return gcm.LeaderAddress(1, LOCAL, next(leaders).port, 0)

        monkeypatch.setattr(locate, "read_leader", named)
        with as_holder(card):
            client = GcmClient(f"{LOCAL}:1")
            with pytest.raises(CardRevoked, match="alice was revoked"):
                await client.request(gcm.ListHosts(), gcm.Hosts)
            assert issubclass(CardRevoked, AccessDenied)
            assert await client.request(gcm.ListHosts(), gcm.Hosts) == gcm.Hosts(())
            client.close()
