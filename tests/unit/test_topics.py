"""Topic filters: literals are prefixes, wildcards are tokens, and the Exchange's prefixes let everything wanted through."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from roq.errors import InvalidTopic
from roq.pubsub.subscription import CACHED_TOPICS, TopicFilter, check_filter, prefix_of

words = st.lists(st.sampled_from(["eu", "us", "paris", "rain", ""]), min_size=1, max_size=4).map(".".join).filter(bool)
tokens = st.sampled_from(["eu", "us", "paris", "rain", "*"])
wild = st.tuples(st.lists(tokens, min_size=1, max_size=4), st.booleans()).map(lambda one: ".".join(one[0] + [">"] * one[1]))


@pytest.mark.parametrize(
    ("pattern", "wanted", "unwanted"),
    [
        ("eu.paris", ["eu.paris", "eu.paris.rain", "eu.parisian"], ["eu", "eu.pari", "us.eu.paris"]),
        (
            "eu.*.rain",
            ["eu.paris.rain", "eu.ü.rain"],
            ["eu.rain", "eu.paris.rain.now", "eu.paris.rainy", "eu..rain", "eu.a.b.rain"],
        ),
        ("eu.>", ["eu.paris", "eu.paris.rain", "eu.."], ["eu", "eu.", "eur.paris"]),
        (">", ["eu", "eu.paris", ".", "\n"], []),
        ("*", ["eu"], ["eu.paris", "."]),
        ("*.paris", ["eu.paris"], ["paris", "eu.paris.rain"]),
        ("a*b", ["a*b", "a*bc"], ["axb"]),
        ("a.b+", ["a.b+", "a.b+c"], ["a.bb", "axb+"]),
        ("a>", ["a>", "a>b"], ["a.b"]),
        ("line\nbreak.*", ["line\nbreak.x"], ["line\nbreak", "linexbreak.x"]),
    ],
)
def test_what_a_filter_matches(pattern: str, wanted: list[str], unwanted: list[str]) -> None:
    one = TopicFilter((pattern,))
    assert [topic for topic in wanted if not one.wants(topic.encode())] == []
    assert [topic for topic in unwanted if one.wants(topic.encode())] == []


@pytest.mark.parametrize("pattern", ["", ">.eu", "eu.>.rain", "a\0b", "x" * 256, "\ud800"])
def test_ill_formed_filters_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidTopic):
        check_filter(pattern)
    with pytest.raises(InvalidTopic):
        TopicFilter(("eu", pattern))


@pytest.mark.parametrize(
    ("pattern", "prefix"), [("eu.paris", b"eu.paris"), ("eu.*.rain", b"eu."), ("eu.>", b"eu."), (">", b""), ("*.a", b"")]
)
def test_what_the_exchange_is_asked_for(pattern: str, prefix: bytes) -> None:
    assert prefix_of(pattern) == prefix


def test_prefixes_within_prefixes_are_left_out() -> None:
    assert TopicFilter(("eu.paris", "eu.*", "us", "eu", "usa.>")).prefixes == [b"eu", b"us"]
    assert TopicFilter((">", "eu")).prefixes == [b""]


def test_undecodable_topics_are_not_wanted() -> None:
    assert not TopicFilter((">",)).wants(b"\xfe\xfe")


def test_what_is_remembered_is_bounded() -> None:
    one = TopicFilter(("a",))
    for number in range(CACHED_TOPICS + 10):
        assert one.wants(b"a%d" % number)
    assert len(one._known) <= CACHED_TOPICS


def matches(pattern: list[str], topic: list[str]) -> bool:
    """A wildcard pattern by its definition."""
    if not pattern or not topic:
        return not pattern and not topic
    if pattern[0] == ">":
        return any(topic) or len(topic) > 1
    return (pattern[0] == topic[0] or (pattern[0] == "*" and topic[0] != "")) and matches(pattern[1:], topic[1:])


@given(wild.filter(lambda pattern: "*" in pattern or ">" in pattern), words)
def test_wildcards_by_their_definition(pattern: str, topic: str) -> None:
    assert TopicFilter((pattern,)).wants(topic.encode()) == matches(pattern.split("."), topic.split("."))


@given(st.lists(wild, min_size=1, max_size=4), words)
def test_the_prefixes_let_everything_wanted_through(patterns: list[str], topic: str) -> None:
    one = TopicFilter(tuple(patterns))
    assert one.wants(topic.encode()) == any(TopicFilter((pattern,)).wants(topic.encode()) for pattern in patterns)
    assert not one.wants(topic.encode()) or any(topic.encode().startswith(prefix) for prefix in one.prefixes)
