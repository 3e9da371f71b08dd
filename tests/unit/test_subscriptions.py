"""Who gets what: Subscriptions against the naive answer, whatever was subscribed to, ended and forgotten in between.

Not covered: connections (tests/integration/test_links.py).
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from roq.errors import FrameError
from roq.runtime import links
from roq.runtime.links import Subscriptions
from roq.wire.limits import SUBSCRIPTIONS_MAX

prefixes = st.text("ab\0", max_size=4).map(str.encode)
peers = st.integers(0, 3)
moves = st.one_of(
    st.tuples(st.just("add"), peers, prefixes),
    st.tuples(st.just("remove"), peers, prefixes),
    st.tuples(st.just("forget"), peers, st.just(b"")),
    st.tuples(st.just("route"), peers, st.just(b"")),
)
keys = st.lists(st.text("ab\0", max_size=6).map(str.encode), min_size=1, max_size=6)


def check(subscriptions: Subscriptions[int], known: dict[int, set[bytes]], asked: list[bytes]) -> None:
    same = dict[frozenset[int], tuple[int, ...]]()
    for key in (*asked, *asked):
        route = subscriptions.route(key)
        assert len(set(route)) == len(route)
        assert set(route) == {peer for peer, own in known.items() if any(key.startswith(prefix) for prefix in own)}
        assert same.setdefault(frozenset(route), route) is route


@settings(max_examples=400)
@given(st.lists(moves, max_size=20), keys)
@example([("add", 0, b"a"), ("add", 1, b"ab"), ("add", 1, b"b"), ("add", 0, b"b")], [b"ab", b"b"])
@example([("add", 0, b"b"), ("add", 1, b"a"), ("add", 0, b"a"), ("add", 1, b"b")], [b"a", b"b"])
def test_a_route_is_who_subscribed_to_a_beginning_of_the_key(script: list[tuple[str, int, bytes]], asked: list[bytes]) -> None:
    subscriptions, known = Subscriptions[int](), dict[int, set[bytes]]()
    for what, peer, prefix in script:
        if what == "add":
            subscriptions.add(peer, prefix)
            known.setdefault(peer, set()).add(prefix)
        elif what == "remove":
            subscriptions.remove(peer, prefix)
            known.get(peer, set()).discard(prefix)
        elif what == "forget":
            subscriptions.forget(peer)
            known.pop(peer, None)
        else:
            check(subscriptions, known, asked)
    check(subscriptions, known, asked)
    for peer in range(4):
        subscriptions.forget(peer)
    assert subscriptions.route(asked[0]) == ()
    assert not subscriptions._peers
    assert not subscriptions._prefixes


def test_one_peer_has_a_limit_and_others_do_not_feel_it() -> None:
    subscriptions = Subscriptions[int]()
    for number in range(SUBSCRIPTIONS_MAX):
        subscriptions.add(1, b"%d" % number)
    with pytest.raises(FrameError):
        subscriptions.add(1, b"one more")
    subscriptions.add(2, b"one more")
    assert subscriptions.route(b"one more") == (2,)
    subscriptions.remove(1, b"7")
    subscriptions.add(1, b"one more")
    assert set(subscriptions.route(b"one more")) == {1, 2}
    subscriptions.forget(1)
    assert subscriptions.route(b"5") == ()
    subscriptions.add(1, b"5")
    assert subscriptions.route(b"5") == (1,)


def test_routes_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROUTES_KEPT", 10)
    subscriptions = Subscriptions[int]()
    subscriptions.add(1, b"a")
    first = subscriptions.route(b"a")
    for number in range(100):
        assert subscriptions.route(b"a%d" % number) is first
        assert len(subscriptions._routes) <= 10
