"""Whether a machine may be destroyed: nothing is on its host any more, and nothing counts on what its store keeps."""

from __future__ import annotations

from gcm.cluster import STORE_NAME
from gcm.evacuator import RemainsCounter
from gcm.shuffle_leader import ShuffleLeader
from gcm.watcher import ClusterWatcher


async def why_in_use(view: ClusterWatcher, remains: RemainsCounter, shuffles: ShuffleLeader, host: str) -> str:
    """ "" if it is empty, else why not. Raises Unavailable.

    Owners are asked, and not the store: they name what is on a lost host, too, and what is on its way there.
    """
    if STORE_NAME in view.cluster.host(host).running:  # it may be told to end, and not have
        return "its store runs"
    found = await remains.count(host, shuffles.ranges_on(host))
    if not found.processes and not found.data and not found.waits:  # a master that does not say is waited for
        return ""
    data = f"{found.segments} segments, {found.payloads} payloads and {found.ranges} ranges" if found.data else "no data"
    return f"{found.processes} processes and {data} are on it{''.join(f'; {why}' for why in found.waits)}"
