"""The cluster's access list in ZooKeeper: written by whichever GCM is asked, taken by every GCM and every host.

It is signed by the authority and has a version, so neither who writes it nor in which order matters: the highest counts.
"""

from __future__ import annotations

from contextlib import suppress

from roq.coordination import paths
from roq.coordination.link import Node, NodeExists, VersionConflict
from roq.coordination.session import Session
from roq.errors import AccessDenied, CallError
from roq.runtime.observe import logger
from roq.runtime.security import process_security
from roq.wire.access import AccessInfo, GetAccess, SetAccess
from roq.wire.card import AccessList

log = logger(__name__)


async def take_access(session: Session) -> None:
    """Before anything is served: who was revoked while no GCM ran gets in nowhere."""
    security = process_security()
    node = await session.get(paths.ACCESS) if security is not None else None
    if security is None or node is None or not node.data:
        return
    with suppress(AccessDenied):  # it is told when it is watched
        security.take(node.data)


class AccessKeeper:
    """Of one GCM."""

    def __init__(self, session: Session) -> None:
        self._session, self._security = session, process_security()
        if self._security is not None:
            session.watch_data(paths.ACCESS, self._seen)

    def _seen(self, node: Node | None) -> None:
        if self._security is None or node is None or not node.data:
            return
        try:
            self._security.take(node.data)
        except AccessDenied as error:  # whoever writes to ZooKeeper is no authority for that
            log.error("access list refused", extra={"fields": {"reason": str(error)}})

    async def handle(self, request: SetAccess | GetAccess) -> AccessInfo:
        """Raises CallError: this cluster has no security; AccessDenied: no authority of it has signed the list."""
        if self._security is None:
            raise CallError("this cluster has no security: its GCMs and hosts were started without cards")
        known = await self._session.get(paths.ACCESS)
        while isinstance(request, SetAccess):
            asked = self._security.checked(request.signed)
            have = self._list(known)
            version = asked.version
            if version < have.version or (version == have.version and not {*asked.revoked} <= {*have.revoked}):
                told = f"the cluster has access list {have.version}, this is another {version}"
                raise CallError(f"{told}: is the authority's file an old copy?")
            if version == have.version:
                break
            try:
                if known is None:
                    await self._session.create(paths.ACCESS, request.signed)
                else:
                    await self._session.set(paths.ACCESS, request.signed, known.version)
            except (NodeExists, VersionConflict):  # somebody else has written meanwhile
                known = await self._session.get(paths.ACCESS)
                continue
            log.info("access list changed", extra={"fields": {"version": version}})
            return AccessInfo(request.signed)
        return AccessInfo(b"" if known is None else known.data)

    def _list(self, node: Node | None) -> AccessList:
        """In this node; of version -1 if that is none, so any replaces it."""
        assert self._security is not None
        with suppress(AccessDenied):
            if node is not None:
                return self._security.checked(node.data)
        return AccessList(-1)
