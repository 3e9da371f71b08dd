"""What the options of all our formats have in common: the address, whole numbers, names; nothing unknown passes silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roq.spark.errors import option_error

WHERE = ("address", "cluster")


def address_of(options: Mapping[str, str], example: str) -> str:
    """`address` as it is, or roq:// and `cluster` ("zk1:2181,zk2:2181"). example: of an address, for the message."""
    address, cluster = options.get("address", "").strip(), options.get("cluster", "").strip()
    if address and cluster:
        raise option_error("address", "give address or cluster, not both")
    if not address and not cluster:
        raise option_error("address", f'is missing; for instance {example}, or .option("cluster", "zk1:2181,zk2:2181")')
    return address or f"roq://{cluster.removeprefix('roq://')}"


def name_of(options: Mapping[str, str], what: str) -> str:
    """What .load("name") or .save("name") was given. what: a noun for the message."""
    if options.get("paths"):
        raise option_error("path", f"one {what} at a time")
    name = options.get("path", "").strip()
    if not name:
        raise option_error("path", f'is missing: name the {what} in .load("name") or .save("name")')
    return name


def whole_number(options: Mapping[str, str], option: str, default: int, least: int, most: int) -> int:
    """An option that is a number from `least` to `most`."""
    text = options.get(option, str(default)).strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise option_error(option, f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def refuse_unknown(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Each option must be one of these, in any case: a typing error is not a default."""
    names = {name.lower() for name in known} | {"path", "paths"}
    for option in options:
        if option.lower() not in names:
            raise option_error(option, f"is unknown; there are {', '.join(sorted(known))}")
