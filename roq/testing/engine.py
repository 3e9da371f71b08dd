"""The Docker engine as DockerCluster uses it: awaitable calls, everything labelled with its owner, leftovers swept.

An owner is a process; what a dead one left (its test run crashed) is removed by the next. Nothing else is ever touched.
Not covered: what the containers are (roq/testing/docker_cluster.py).
"""

from __future__ import annotations

import asyncio
import http
import io
import ipaddress
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from roq.errors import ProcessFailed
from roq.runtime.installation import install
from roq.runtime.liveness import start_time
from roq.runtime.observe import logger
from roq.testing.cluster import NotPossible

try:
    import docker
    import docker.errors
    import docker.types
except ImportError:  # the extra `testing`
    docker = None

T = TypeVar("T")
log = logger(__name__)
OWNER_LABEL, CLUSTER_LABEL = "roq.testing.owner", "roq.testing.cluster"
SUBNETS = tuple(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))  # for tests between hosts, never routed
CALL_SECONDS = 60.0  # one call to the engine
STOP_SECONDS = 10  # a container that is stopped, until it is killed
FRAME = struct.Struct(">4xL")  # before each piece of what a program prints: stream, length
ROUTE_METRIC = "4000000000"


def owner() -> str:
    """This process, never mistaken for a later one with its number: boot, pid, start time."""
    return f"{_boot()}/{os.getpid()}/{start_time(os.getpid())}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]


def alive(mark: str) -> bool:
    """Whether the process with this mark still runs."""
    boot, _, rest = mark.partition("/")
    pid, _, start = rest.partition("/")
    started = start_time(int(pid)) if pid.isdigit() else None
    return boot == _boot() and started is not None and str(started) == start


class Engine:
    """The engine that the environment (DOCKER_HOST) names. Raises NotPossible if none answers."""

    def __init__(self) -> None:
        if docker is None:
            raise NotPossible(f"a DockerCluster needs the Docker SDK: {install('testing')}")
        try:
            self._client = docker.from_env(timeout=CALL_SECONDS, max_pool_size=32)
            self._client.ping()
        except docker.errors.DockerException as error:
            raise NotPossible(f"no Docker engine answers: {error}") from None

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """One blocking call of the SDK, in a thread. Raises ProcessFailed with the engine's words."""
        try:
            return await asyncio.to_thread(function, *arguments, **options)
        except (docker.errors.DockerException, OSError) as error:  # its connection may break
            raise ProcessFailed(f"docker: {error}") from error

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    # --- networks -------------------------------------------------------------------------------------------------------

    async def network(self, token: str) -> tuple[Any, ipaddress.IPv4Network]:
        """A closed network of its own: machines reach each other and this machine's bridge, nothing else."""
        taken = [ipaddress.ip_network(subnet) for subnet in await self.call(self._subnets)]
        for subnet in SUBNETS:
            if any(subnet.overlaps(other) for other in taken if isinstance(other, ipaddress.IPv4Network)):
                continue
            pool = docker.types.IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))
            options = {"ipam": docker.types.IPAMConfig(pool_configs=[pool]), "labels": labels(token), "internal": True}
            try:
                network = await self.call(self._client.networks.create, f"roq-{token}", driver="bridge", **options)
            except ProcessFailed as error:
                if "overlap" not in str(error):
                    raise
                continue  # another run was quicker
            self._keep_inside(str(subnet))
            return network, subnet
        raise NotPossible("no free subnet for a Docker network")

    def _subnets(self) -> list[str]:
        return [subnet for network in self._client.networks.list() for subnet in _subnets_of(network)]

    def _keep_inside(self, subnet: str) -> None:
        """A packet for a network that is gone must not leave this machine by its default route."""
        _ip_route("add", subnet)

    # --- containers -----------------------------------------------------------------------------------------------------

    async def container(
        self,
        token: str,
        name: str,
        image: str,
        command: Sequence[str],
        *,
        network: Any,
        address: str,
        environment: Mapping[str, str],
        tmpfs: Mapping[str, str],
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Create one container; it is not started. options: of the SDK, beside or instead of ours."""
        endpoint = self._client.api.create_endpoint_config(ipv4_address=address)
        return await self.call(
            self._client.containers.create,
            image,
            list(command),
            name=f"roq-{token}-{name}",
            hostname=name,
            network=network.name,
            networking_config={network.name: endpoint},
            environment=dict(environment),
            labels=labels(token),
            tmpfs=dict(tmpfs),
            **{
                "init": True,  # reaps what a killed daemon leaves
                "cap_add": ["NET_ADMIN"],  # partitions are made inside
                **(options or {}),
            },
        )

    async def image_there(self, image: str) -> bool:
        """The engine has this image."""
        try:
            await asyncio.to_thread(self._client.images.get, image)
        except docker.errors.ImageNotFound:
            return False
        return True

    async def run(self, container: Any, script: str) -> str:
        """Run a shell script in a container as root; what it printed. Raises ProcessFailed if it fails."""
        code, output = await self.call(self._run, container.id, script)
        text = output.decode(errors="replace")
        if code:
            raise ProcessFailed(f"in {container.name}: exit code {code}: {text.strip()[-500:]}")
        return text

    def _run(self, id: str, script: str) -> tuple[int, bytes]:
        """Exit code, what it printed. The SDK's `exec_run` loses what comes together with the answer's headers: it reads on
        from the socket below the buffer that has it."""
        api = self._client.api
        running = api.exec_create(id, ["sh", "-c", script], user="root")["Id"]
        url = f"{api.base_url}/v{api.api_version}/exec/{running}/start"
        answer = api.post(url, json={"Detach": False, "Tty": False}, timeout=CALL_SECONDS)
        if not answer.ok:
            raise docker.errors.APIError(answer.text, response=answer)
        printed, rest = bytearray(), memoryview(answer.content)
        while rest:
            (length,) = FRAME.unpack_from(rest)
            printed += rest[FRAME.size : FRAME.size + length]
            rest = rest[FRAME.size + length :]
        return api.exec_inspect(running)["ExitCode"], bytes(printed)

    async def write(self, container: Any, path: Path, text: str) -> None:
        """Write a small file into a container, running or not."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
        await self.call(container.put_archive, str(path.parent), archive.getvalue())

    # --- removal --------------------------------------------------------------------------------------------------------

    async def sweep(self) -> list[str]:
        """Remove what test runs that died have left; the names."""
        return await self._remove({"label": OWNER_LABEL}, lambda found: not alive(found[OWNER_LABEL]))

    async def count(self, label: str) -> int:
        """How many containers and networks have this label."""
        filters = {"label": label}
        containers = await self.call(self._client.containers.list, all=True, filters=filters, ignore_removed=True)
        return len(containers) + len(await self.call(self._client.networks.list, filters=filters))

    async def remove(self, token: str) -> None:
        """Remove everything of one cluster, whatever state it is in."""
        await self._remove({"label": f"{CLUSTER_LABEL}={token}"}, lambda _: True)

    async def _remove(self, filters: dict[str, str], ours: Callable[[Mapping[str, str]], bool]) -> list[str]:
        containers = await self.call(self._client.containers.list, all=True, filters=filters, ignore_removed=True)
        containers = [container for container in containers if ours(container.labels)]
        await asyncio.gather(*(self._gone(container.remove, force=True, v=True) for container in containers))
        networks = await self.call(self._client.networks.list, filters=filters)
        networks = [network for network in networks if ours(network.attrs["Labels"])]
        for network in networks:
            for subnet in _subnets_of(network):  # while it is taken: the next cluster takes the first free one
                _ip_route("del", subnet)
            await self._gone(network.remove)
        return [found.name for found in [*containers, *networks]]

    async def _gone(self, remove: Callable[..., None], **options: Any) -> None:
        try:
            await asyncio.to_thread(remove, **options)
        except docker.errors.NotFound:
            return  # another run swept it
        except docker.errors.APIError as error:
            if error.status_code == http.HTTPStatus.CONFLICT and "already in progress" in str(error.explanation):
                return  # another run sweeps it
            if error.status_code == http.HTTPStatus.FORBIDDEN and "active endpoints" in str(error.explanation):
                # of containers that are gone: the engine miscounts when many end at once, and counts again when it starts
                log.warning("the Docker engine does not let go of a network", extra={"fields": {"reason": str(error)}})
                return
            raise ProcessFailed(f"docker: {error}") from error
        except docker.errors.DockerException as error:
            raise ProcessFailed(f"docker: {error}") from error


def labels(token: str) -> dict[str, str]:
    """What marks everything we make."""
    return {OWNER_LABEL: owner(), CLUSTER_LABEL: token}


def _subnets_of(network: Any) -> list[str]:
    return [entry["Subnet"] for entry in network.attrs["IPAM"]["Config"] or [] if "Subnet" in entry]


def _ip_route(verb: str, subnet: str) -> None:
    """Root only; without it, or without iproute2, nothing is done."""
    command = ["ip", "route", verb, "blackhole", subnet, "metric", ROUTE_METRIC]
    if os.getuid() == 0 and shutil.which("ip"):
        subprocess.run(command, capture_output=True, check=False)
