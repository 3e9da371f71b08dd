"""What `roq doctor` and `roq upgrade check` say of the format that ZooKeeper's tree has."""

from __future__ import annotations

from roq.cli.finding import Finding, good, wrong
from roq.coordination.locate import read_tree_format
from roq.errors import RoqError
from roq.wire.tree_format import FORMAT, TreeFormat

SUBJECT = "ZooKeeper's tree"
ANSWER_SECONDS = 3.0


async def find_tree_format(address: str) -> Finding:
    """address: of ZooKeeper, as commands take it."""
    try:
        return check_tree_format(await read_tree_format(address, ANSWER_SECONDS))
    except RoqError as error:
        return wrong(SUBJECT, str(error), "a GCM that can't read it does not lead")


def check_tree_format(tree: TreeFormat) -> Finding:
    """A tree that is newer than this program may be led by GCMs that are, too."""
    if tree.reads > FORMAT:
        found = f"{tree}; only GCMs that know format {tree.reads} lead, and this program knows {FORMAT}"
        return wrong(SUBJECT, found, f"install version {tree.version} or newer here, and wherever a GCM does not lead for it")
    return good(SUBJECT, f"{tree}; GCMs that know format {tree.reads} may lead (0.1 does not look)")
