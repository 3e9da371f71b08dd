"""Loopback addresses of our own: a /24 of 127.0.0.0/8 per local cluster, so that every host has its own address and many
clusters share a machine without their fixed ports colliding."""

from __future__ import annotations

import os
import socket

from roq.errors import PortTaken

CLAIM_PORT = 6999  # bound on the subnet's last address for as long as the subnet is ours
TRIES = 500
STEP = 7919  # a prime, so that tries spread over all subnets
SUBNETS = 253 * 256  # 127.1.0 … 127.253.255; 127.0.x is left to everybody else


class LoopbackSubnet:
    """One claimed subnet 127.a.b.0/24; the claim ends with close() or with the process."""

    def __init__(self, seed: int | None = None) -> None:
        start = os.getpid() if seed is None else seed
        for attempt in range(TRIES):
            number = (start + attempt * STEP) % SUBNETS
            self._prefix = f"127.{1 + number // 256}.{number % 256}"
            self._claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._claim.bind((f"{self._prefix}.254", CLAIM_PORT))
                return
            except OSError:
                self._claim.close()
        raise PortTaken(f"no free loopback subnet found in {TRIES} tries (port {CLAIM_PORT} is bound on all of them)")

    def address(self, number: int) -> str:
        """Address `number` (1 to 253) of the subnet."""
        if not 1 <= number <= 253:
            raise ValueError(f"a subnet has addresses 1 to 253, not {number}")
        return f"{self._prefix}.{number}"

    def close(self) -> None:
        """Give the subnet back."""
        self._claim.close()


def port_free(address: str, port: int) -> bool:
    """Whether a TCP server could bind there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
