"""The network between machines of a DockerCluster as one value: who can't hear whom, who is slow; and its firewall rules.

Pure: the rules are text for iptables-restore, applied inside a machine. A machine drops or rejects what it must not hear; what
the test's own machine must not hear is dropped or rejected by its sender. Rejections themselves go through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roq.testing.cluster import CLIENT, Cut

DELAY_QUEUE = 7  # number of the kernel's packet queue that docker/test/scripts/delay serves


@dataclass
class Links:
    """addresses: IP address by name, CLIENT included."""

    addresses: Mapping[str, str]
    blocked: dict[tuple[str, str], Cut] = field(default_factory=dict)  # by (source, target)
    delayed: set[str] = field(default_factory=set)  # their packets wait in DELAY_QUEUE

    def block(self, sources: set[str], targets: set[str], how: Cut = Cut.DROP) -> set[str]:
        """Cut these ways; the machines whose rules change."""
        ways = {(source, target) for source in sources for target in targets if source != target}
        new = {way for way in ways if self.blocked.get(way) is not how}
        self.blocked |= dict.fromkeys(new, how)
        return {source if target == CLIENT else target for source, target in new}

    def heal(self) -> set[str]:
        """Open everything; the machines whose rules change."""
        changed = {source if target == CLIENT else target for source, target in self.blocked} | self.delayed
        self.blocked.clear()
        self.delayed.clear()
        return changed

    def forget(self, name: str) -> None:
        """This machine is no more."""
        self.blocked = {way: how for way, how in self.blocked.items() if name not in way}
        self.delayed.discard(name)

    def concern(self, name: str) -> bool:
        """Whether this machine needs rules."""
        return name in self.delayed or any(name in (source, target) for source, target in self.blocked)

    def rules(self, name: str) -> str:
        """All rules of one machine, for iptables-restore."""
        lines = ["*filter", ":INPUT ACCEPT", ":OUTPUT ACCEPT"]  # replaces what was there
        for (source, target), how in sorted(self.blocked.items()):
            if target == name:
                lines += _barred(f"-A INPUT -s {self.addresses[source]}", how)
            elif source == name and target == CLIENT:
                lines += _barred(f"-A OUTPUT -d {self.addresses[CLIENT]}", how)
        if name in self.delayed:
            lines.append(f"-A OUTPUT ! -o lo -j NFQUEUE --queue-num {DELAY_QUEUE} --queue-bypass")
        return "\n".join([*lines, "COMMIT", ""])


def _barred(packets: str, how: Cut) -> list[str]:
    if how is Cut.DROP:
        return [f"{packets} -j DROP"]
    passing = ("-p tcp --tcp-flags RST RST", "-p icmp")
    resets = [f"{packets} -p tcp -j REJECT --reject-with tcp-reset", f"{packets} -j REJECT"]
    return [*(f"{packets} {rejection} -j ACCEPT" for rejection in passing), *resets]
