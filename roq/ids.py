"""Names and identifiers: what is allowed, and how new ones are drawn.

Randomness comes from the operating system; pure code takes ids as arguments and never calls this module.
"""

from __future__ import annotations

import secrets
import unicodedata

from roq.errors import InvalidName, InvalidTopic

NAME_CHARACTERS_MAX = 100  # a name is one ZooKeeper path element and one table cell
TOPIC_BYTES_MAX = 255  # a topic is matched byte by byte at every Exchange
ZOOKEEPER_ENDS = 0xFFF0  # no path has a character from there on
GROUP_MARK = "@"  # between the names of a queue and of a group of it
ID_MIN = 2
RESERVED = "_roq."  # queues whose names begin so are the cluster's own


def new_id() -> int:
    """A random 64-bit identifier (publishers, subscribers), never 0 or 1, which are an Exchange's and the Monitor's."""
    return max(ID_MIN, secrets.randbits(64))


def new_token() -> str:
    """A random 16-character name (transactions, Exchanges)."""
    return secrets.token_hex(8)


def check_name(name: str, what: str = "queue") -> str:
    """The name itself if it can name a queue, host or policy.

    Allowed: 1 to 100 printable characters, commas and blanks inside included; not "/", control characters, surrogates,
    private-use characters or those from U+FFF0 on, emoji among them (ZooKeeper refuses them), "." or "..", nor blanks at
    either end.
    """
    if not isinstance(name, str) or not name:
        raise InvalidName(f"a {what} name must be a non-empty string, got {name!r}")
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidName(f"a {what} name has at most {NAME_CHARACTERS_MAX} characters, got {len(name)}")
    if name in (".", "..") or name != name.strip():
        raise InvalidName(f"{name!r} can't name a {what}: no '.', '..', nor blanks at either end")
    for character in name:
        unfit = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        if character == "/" or unfit or ord(character) >= ZOOKEEPER_ENDS:
            raise InvalidName(f"{name!r} can't name a {what}: character {character!r} is not allowed")
    return name


def is_reserved(queue: str) -> bool:
    """Whether a queue of this name is the cluster's own: nobody else creates one."""
    return queue.startswith(RESERVED)


def check_unreserved(name: str, what: str) -> str:
    """As check_name, of a name that is not the cluster's own."""
    if is_reserved(check_name(name, what)):
        raise InvalidName(f"{name!r} can't name a {what}: names that begin with {RESERVED} are the cluster's own")
    return name


def group_name(queue: str, group: str) -> str:
    """`orders@billing`: the name of a group as a work queue. A queue's name may have an @, a group's may not. Raises
    InvalidName."""
    check_name(queue)
    if GROUP_MARK in check_name(group, "group"):
        raise InvalidName(f"{group!r} can't name a group: no {GROUP_MARK!r}, which stands between the names of queue and group")
    return check_name(f"{queue}{GROUP_MARK}{group}", "group")


def topic_bytes(topic: str) -> bytes:
    """The topic as it travels: 1 to 255 bytes of UTF-8 without NUL."""
    if not isinstance(topic, str):
        raise InvalidTopic(f"a topic is a string, got {type(topic).__name__}")
    try:
        encoded = topic.encode()
    except UnicodeEncodeError as error:
        raise InvalidTopic(f"topic {topic!r} is not valid UTF-8") from error
    if not encoded or len(encoded) > TOPIC_BYTES_MAX or 0 in encoded:
        raise InvalidTopic(f"topic of {len(encoded)} bytes: a topic is 1 to {TOPIC_BYTES_MAX} bytes of UTF-8 without NUL")
    return encoded
