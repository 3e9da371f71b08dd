"""Hosts as containers of one Docker engine."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, TypeVar

from gcm.providers.provider import HostSpec, ProviderFailed
from roq.runtime.installation import install

try:
    import docker
    import docker.errors
except ImportError:  # the extra `fleet`
    docker = None

T = TypeVar("T")
FLEET_LABEL, HOST_LABEL = "roq.fleet", "roq.fleet.host"
CARD = PurePosixPath("/cards/host.card")
USER_ID = 550  # docker/base.sh
STOP_SECONDS = 10


class DockerProvider:
    """engine: its address, None: as the environment says (DOCKER_HOST). image: has roq-hcm, as `make image` builds it. network:
    by name; the GCMs and ZooKeeper must be reachable from there. seconds: bound of one request to the engine."""

    def __init__(self, image: str, network: str, seconds: float, engine: str | None = None) -> None:
        if docker is None:
            raise ProviderFailed(f"hosts as containers need the Docker SDK: {install('fleet')}")
        self._image, self._network, self._seconds, self._engine = image, network, seconds, engine

    def create(self, spec: HostSpec) -> None:
        """See HostProvider."""
        self._with(lambda client: self._create(client, spec))

    def _create(self, client: Any, spec: HostSpec) -> None:
        found = _named(client, spec.name)
        if found is not None and found.labels.get(FLEET_LABEL) != spec.fleet:
            raise ProviderFailed(f"docker: a container named {spec.name} is not of this fleet: it is left alone")
        container = found or client.containers.create(
            self._image,
            ["roq-hcm"],
            name=spec.name,
            hostname=spec.name,
            network=self._network,
            environment={**spec.environment, **({"ROQ_CARD": str(CARD)} if spec.card else {})},
            labels={FLEET_LABEL: spec.fleet, HOST_LABEL: spec.name},
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
        )
        if spec.card:
            container.put_archive(str(CARD.parent), _archive(CARD.name, spec.card))
        container.start()

    def names(self, fleet: str) -> list[str]:
        """See HostProvider."""
        return self._with(lambda client: [str(one.labels.get(HOST_LABEL, one.name)) for one in _all(client, fleet)])

    def destroy(self, name: str, fleet: str) -> None:
        """See HostProvider. It is stopped first, so that the cluster sees at once that it is gone."""

        def destroy(client: Any) -> None:
            for container in _all(client, fleet):
                if container.labels.get(HOST_LABEL) == name:
                    try:
                        container.stop(timeout=STOP_SECONDS)
                        container.remove(force=True, v=True)
                    except docker.errors.NotFound:
                        continue  # somebody else was quicker

        self._with(destroy)

    def _with(self, work: Callable[[Any], T]) -> T:
        """With a client of its own: calls come from many threads, and one that hangs holds up no other."""
        try:
            options: dict[str, Any] = {"timeout": self._seconds}
            client = docker.DockerClient(self._engine, **options) if self._engine else docker.from_env(**options)
            try:
                return work(client)
            finally:
                client.close()
        except (docker.errors.DockerException, OSError) as error:
            raise ProviderFailed(f"docker: {error}") from error


def _named(client: Any, name: str) -> Any | None:
    try:
        return client.containers.get(name)
    except docker.errors.NotFound:
        return None


def _all(client: Any, fleet: str) -> list[Any]:
    filters = {"label": f"{FLEET_LABEL}={fleet}"}
    return list(client.containers.list(all=True, filters=filters, ignore_removed=True))


def _archive(name: str, data: bytes) -> bytes:
    """A tar archive with this file, for the daemon's user alone."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o400, USER_ID, USER_ID
        tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()
