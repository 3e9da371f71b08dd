"""Hosts as processes of this machine, each on a loopback address of its own, as `roq up` starts them. For trying things out.

A process belongs to its host by a mark in its environment (roq/tools/local/leftovers.py), so a host outlives the GCM that made
it, every GCM of the machine finds it, and `roq up` ends it with the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from gcm.providers.provider import HostSpec, ProviderFailed
from roq.tools.local import leftovers
from roq.tools.local.cluster import HCM_PORT, HCM_PORT_BASE
from roq.tools.local.loopback import port_free

STOP_SECONDS = 8.0  # an HCM stops its processes in order
LAST_BYTE, ADDRESSES = 250, 150  # of the loopback addresses: from the top down, `roq up` takes them from below


class ProcessProvider:
    """directory: gets a folder and a log for each host. address: of the GCM; hosts take others of the same /24."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self._subnet = directory, address.rpartition(".")[0]
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        mark = os.environ.get(leftovers.MARK, "")
        self._token = mark.partition("/")[0]  # of the local cluster that we belong to, if we do

    def create(self, spec: HostSpec) -> None:
        """See HostProvider."""
        with self._lock:  # two at once would find the same address free
            if spec.name in self.names(spec.fleet):
                return
            place = self._directory / spec.name
            place.mkdir(parents=True, exist_ok=True)
            own = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_")}
            environment = {**own, **spec.environment, **leftovers.mark(self._mark(spec.fleet), spec.name)}
            if leftovers.ORIGIN in os.environ:
                environment[leftovers.ORIGIN] = os.environ[leftovers.ORIGIN]
            arguments = ["--address", self._free_address(spec.name), "--port", str(HCM_PORT), "--port-base", str(HCM_PORT_BASE)]
            if spec.card:
                card = place / "host.card"
                card.touch(0o600)
                card.write_bytes(spec.card)
                arguments += ["--card", str(card)]
            command = [sys.executable, "-m", "hcm", *arguments, "--state-dir", str(place), "--no-keep-children"]
            with (self._directory / f"{spec.name}.log").open("ab") as output:
                try:
                    child = subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=output,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise ProviderFailed(f"roq-hcm can't be started: {error}") from error
            self._children.append(child)

    def names(self, fleet: str) -> list[str]:
        """See HostProvider."""
        self._children = [child for child in self._children if child.poll() is None]  # or they stay zombies
        found = {process.owner for process in leftovers.find(self._mark(fleet))}
        return sorted(name for name in found if name.startswith(f"roq-{fleet}-"))

    def destroy(self, name: str, fleet: str) -> None:
        """See HostProvider. Cleanly, if its HCM stops its processes in time."""
        if left := leftovers.stop_owner(self._mark(fleet), name, STOP_SECONDS):
            raise ProviderFailed(f"process {left[0].pid} of {name} could not be ended")
        self.names(fleet)

    def _mark(self, fleet: str) -> str:
        return self._token or f"fleet-{fleet}"

    def _free_address(self, name: str) -> str:
        number = int(name.rpartition("-")[2])
        for step in range(ADDRESSES):
            address = f"{self._subnet}.{LAST_BYTE - (number - 1 + step) % ADDRESSES}"
            if port_free(address, HCM_PORT):
                return address
        raise ProviderFailed(f"no address of {self._subnet}.0/24 is free")
