"""The network between machines of a DockerCluster as one value: who can't hear whom, who is slow; and its firewall rules.

Pure: the rules are text for iptables-restore, applied inside a machine. A machine drops what it must not hear; what the
test's own machine must not hear is dropped by its sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roq.testing.cluster import CLIENT

DELAY_QUEUE = 7  # number of the kernel's packet queue that docker/scripts/delay serves


@dataclass
class Links:
    """addresses: IP address by name, CLIENT included."""

    addresses: Mapping[str, str]
    blocked: set[tuple[str, str]] = field(default_factory=set)  # (source, target)
    delayed: set[str] = field(default_factory=set)  # their packets wait in DELAY_QUEUE

    def block(self, sources: set[str], targets: set[str]) -> set[str]:
        """Cut these ways; the machines whose rules change."""
        new = {(source, target) for source in sources for target in targets if source != target} - self.blocked
        self.blocked |= new
        return {source if target == CLIENT else target for source, target in new}

    def heal(self) -> set[str]:
        """Open everything; the machines whose rules change."""
        changed = {source if target == CLIENT else target for source, target in self.blocked} | self.delayed
        self.blocked.clear()
        self.delayed.clear()
        return changed

    def concern(self, name: str) -> bool:
        """Whether this machine needs rules."""
        return name in self.delayed or any(name in (source, target) for source, target in self.blocked)

    def rules(self, name: str) -> str:
        """All rules of one machine, for iptables-restore."""
        lines = ["*filter", ":INPUT ACCEPT", ":OUTPUT ACCEPT"]  # replaces what was there
        for source, target in sorted(self.blocked):
            if target == name:
                lines.append(f"-A INPUT -s {self.addresses[source]} -j DROP")
            elif source == name and target == CLIENT:
                lines.append(f"-A OUTPUT -d {self.addresses[CLIENT]} -j DROP")
        if name in self.delayed:
            lines.append(f"-A OUTPUT ! -o lo -j NFQUEUE --queue-num {DELAY_QUEUE} --queue-bypass")
        return "\n".join([*lines, "COMMIT", ""])
