"""`roq host new-disk`: the disk of a host's store is lost for good. A store takes no other disk than the one that ZooKeeper
names (roq/log/store/identity.py), so that one that is not mounted, or that was swapped, is noticed."""

from __future__ import annotations

from roq.coordination import paths
from roq.coordination.link import NoNode
from roq.coordination.session import Session
from roq.errors import AccessDenied, CallError, HostNotFound


async def forget_disk(zookeeper: str, host: str) -> bool:
    """The host's next disk, an empty one, will be taken; False if no disk of it is known.

    Raises HostNotFound, CallError (the host is up), AccessDenied (the card is no member's), ZooKeeperUnavailable."""
    session = await Session.connect(zookeeper)
    try:
        if await session.get(paths.host(host)) is not None:
            raise CallError(f"host {host} is up, with the disk it has: `roq host stop {host}` first")
        if await session.get(paths.host_state(host)) is None:
            raise HostNotFound(f"no host of name {host!r} was ever in the cluster")
        await session.delete(paths.store_cookie(host))
    except NoNode:
        return False
    except AccessDenied as error:
        told = "only members of the cluster write there: do it on a host, `roq --card /etc/roq/hcm.card host new-disk …`"
        raise AccessDenied(f"{error}; {told}") from None
    finally:
        await session.close()
    return True
