"""Who hears whom on a cluster's network, by datagrams: TCP would not tell the directions apart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from roq.testing import DockerCluster

PORT, SECONDS = 9999, 1.5
# All of them stay until the same moment, however late the last one begins: machines of one kernel share its clock.
SCRIPT = """python3 -c '
import select, socket, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("0.0.0.0", {port}))
heard = set()
while time.monotonic() < {until}:
    for address in "{others}".split():
        link.sendto(b"{name}", (address, {port}))
    while select.select([link], [], [], 0.05)[0]:
        heard.add(link.recv(100).decode())
print(*sorted(heard))
'"""


async def hearing(cluster: DockerCluster, machines: Iterable[str]) -> set[tuple[str, str]]:
    """All pairs (source, target) of which the target hears the source, now."""
    everyone = list(machines)
    until = time.monotonic() + SECONDS + 0.5 * len(everyone)

    async def one(name: str) -> set[tuple[str, str]]:
        others = " ".join(cluster.address(other) for other in everyone if other != name)
        script = SCRIPT.format(port=PORT, until=until, others=others, name=name)
        return {(source, name) for source in (await cluster.run(name, script)).split()}

    return set().union(*await asyncio.gather(*(one(name) for name in everyone)))


def all_pairs(machines: Iterable[str]) -> set[tuple[str, str]]:
    """Everybody hears everybody."""
    everyone = list(machines)
    return {(source, target) for source in everyone for target in everyone if source != target}
