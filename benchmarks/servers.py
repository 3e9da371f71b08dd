"""Servers of the peers, each started fresh on free loopback ports in a directory of its own, and ended with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.machine import with_descendants

UP_SECONDS = 60.0  # RabbitMQ takes its time
RABBIT_SECONDS = 3.0  # after its port opens, until it has stopped working by itself
LOOK_SECONDS = 0.1
LOG_SHOWN = 500  # characters of a failed server's output
ADDRESS = "127.0.0.1"
SEARCH_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))  # a wheel's go first
POSTGRES_SECONDS = 1.0  # after its port opens, until it takes connections
POSTGRES_BIN = max(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), default=Path("/usr/lib/postgresql/bin")
)
AS_POSTGRES = ("runuser", "-u", "postgres", "--") if os.geteuid() == 0 else ()  # it refuses to run as root
RABBIT_VERSION = "/usr/lib/rabbitmq/bin/rabbitmqctl"
RABBIT_SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the package's wrapper in /usr/sbin would change the user


class Plan(NamedTuple):
    """How to run one server."""

    command: list[str]
    environment: dict[str, str]
    address: str  # for its clients
    port: int  # open when it serves
    settle_seconds: float = 0.3


class Server(NamedTuple):
    """A running server."""

    address: str
    pids: set[int]


def free_ports(count: int) -> list[int]:
    """Ports nobody uses just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((ADDRESS, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _nats(directory: Path) -> Plan:
    (port,) = free_ports(1)
    configuration = directory / "nats.conf"
    configuration.write_text(f'listen: {ADDRESS}:{port}\nmax_pending: 4GB\nwrite_deadline: "120s"\n')
    return Plan(["nats-server", "-c", str(configuration)], {}, f"nats://{ADDRESS}:{port}", port)


def _redis(directory: Path) -> Plan:
    (port,) = free_ports(1)
    flags = {
        "--port": [str(port)],
        "--bind": [ADDRESS],
        "--save": [""],
        "--appendonly": ["no"],
        "--dir": [str(directory)],
        "--client-output-buffer-limit": ["pubsub", "0", "0", "0"],
        "--daemonize": ["no"],
    }
    command = ["redis-server", *(part for flag, values in flags.items() for part in (flag, *values))]
    return Plan(command, {}, f"{ADDRESS}:{port}", port)


def _rabbitmq(directory: Path) -> Plan:
    port, distribution, names = free_ports(3)
    configuration = directory / "rabbitmq.conf"
    configuration.write_text(
        f"listeners.tcp.1 = {ADDRESS}:{port}\nloopback_users.guest = true\nvm_memory_high_watermark.absolute = 8GB\n"
        "disk_free_limit.absolute = 1GB\nlog.console = false\nlog.file.level = warning\n"
    )
    (directory / "plugins").write_text("[].\n")
    environment = {
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(configuration),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_ADDRESS": ADDRESS,
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    return Plan([RABBIT_SERVER], environment, f"amqp://guest:guest@{ADDRESS}:{port}/", port, RABBIT_SECONDS)


def _rabbitmq_streams(directory: Path) -> Plan:
    """Its plugin for streams, which names the port that the address has."""
    plan, (port,) = _rabbitmq(directory), free_ports(1)
    (directory / "plugins").write_text("[rabbitmq_stream].\n")
    with (directory / "rabbitmq.conf").open("a") as file:
        file.write(
            f"stream.listeners.tcp.1 = {ADDRESS}:{port}\nstream.advertised_host = {ADDRESS}\nstream.advertised_port = {port}\n"
        )
    environment = {**plan.environment, "RABBITMQ_STREAM_DIR": str(directory / "streams")}
    return plan._replace(environment=environment, address=f"rabbitmq-stream://guest:guest@{ADDRESS}:{port}/", port=port)


def _redis_aof(directory: Path, sync: str = "always") -> Plan:
    (port,) = free_ports(1)
    flags = ("--save", "", "--appendonly", "yes", "--appendfsync", sync, "--dir", str(directory), "--daemonize", "no")
    command = ["redis-server", "--port", str(port), "--bind", ADDRESS, *flags]
    return Plan(command, {}, f"{ADDRESS}:{port}", port)


def _redis_everysec(directory: Path) -> Plan:
    return _redis_aof(directory, "everysec")


def _jetstream(directory: Path, sync: str = "") -> Plan:
    (port,) = free_ports(1)
    configuration = directory / "nats.conf"
    configuration.write_text(f"listen: {ADDRESS}:{port}\njetstream {{\n  store_dir: {directory}/store\n{sync}}}\n")
    return Plan(["nats-server", "-c", str(configuration)], {}, f"nats://{ADDRESS}:{port}", port)


def _jetstream_sync(directory: Path) -> Plan:
    return _jetstream(directory, "  sync_interval: always\n")


def _beanstalkd(directory: Path) -> Plan:
    (port,) = free_ports(1)
    return Plan(["beanstalkd", "-l", ADDRESS, "-p", str(port), "-b", str(directory), "-f", "0"], {}, f"{ADDRESS}:{port}", port)


def _postgresql(directory: Path) -> Plan:
    """As it is installed: a commit is on the disk."""
    (port,) = free_ports(1)
    directory.chmod(0o755)
    if AS_POSTGRES:
        shutil.chown(directory, "postgres")
    data = str(directory / "data")
    command = [*AS_POSTGRES, str(POSTGRES_BIN / "initdb"), "-D", data, "-U", "roq", "--auth=trust", "-E", "UTF8", "--no-locale"]
    subprocess.run(command, check=True, capture_output=True)
    settings = (f"listen_addresses={ADDRESS}", f"unix_socket_directories={directory}")
    flags = [part for setting in settings for part in ("-c", setting)]
    serve = [*AS_POSTGRES, str(POSTGRES_BIN / "postgres"), "-D", data, "-p", str(port), *flags]
    return Plan(serve, {}, f"postgresql://roq@{ADDRESS}:{port}/postgres", port, POSTGRES_SECONDS)


def _zmq_proxy(directory: Path) -> Plan:
    front, back = free_ports(2)
    command = [sys.executable, "-m", "benchmarks.zmq_proxy", ADDRESS, str(front), str(back)]
    return Plan(command, {}, f"{ADDRESS}:{front}:{back}", back)


PLANS: dict[str, Callable[[Path], Plan]] = {
    "nats": _nats,
    "redis": _redis,
    "redis-aof": _redis_aof,
    "redis-everysec": _redis_everysec,
    "rabbitmq": _rabbitmq,
    "rabbitmq-streams": _rabbitmq_streams,
    "jetstream": _jetstream,
    "jetstream-sync": _jetstream_sync,
    "beanstalkd": _beanstalkd,
    "postgresql": _postgresql,
    "zmq-proxy": _zmq_proxy,
}
PROGRAMS = {
    "nats": "nats-server",
    "redis": "redis-server",
    "redis-aof": "redis-server",
    "redis-everysec": "redis-server",
    "rabbitmq": RABBIT_SERVER,
    "rabbitmq-streams": RABBIT_SERVER,
    "jetstream": "nats-server",
    "jetstream-sync": "nats-server",
    "beanstalkd": "beanstalkd",
    "postgresql": str(POSTGRES_BIN / "postgres"),
    "zmq-proxy": sys.executable,
}


def installed(kind: str) -> bool:
    """The server's program is there."""
    return shutil.which(PROGRAMS[kind], path=SEARCH_PATH) is not None


async def version(kind: str) -> str:
    """What the server says of itself. RabbitMQ gives its number only."""
    program = shutil.which(PROGRAMS[kind], path=SEARCH_PATH) or PROGRAMS[kind]
    command = [RABBIT_VERSION, "version"] if program == RABBIT_SERVER else [program, "--version"]  # it would start with that
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode().strip().partition("\n")[0]


async def jetstream_syncs() -> bool:
    """Whether the nats-server that is installed knows `sync_interval: always`."""
    with tempfile.TemporaryDirectory() as directory:
        plan = _jetstream_sync(Path(directory))
        program = shutil.which(plan.command[0], path=SEARCH_PATH)
        if program is None:
            return False
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(program, "-t", *plan.command[1:], stdout=silent, stderr=silent)
        return await process.wait() == 0


@contextlib.asynccontextmanager
async def running(kind: str) -> AsyncIterator[Server]:
    """The server, until the block ends."""
    with tempfile.TemporaryDirectory(prefix=f"roq-peer-{kind}-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        plan = PLANS[kind](directory)
        with (directory / "output.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                env={**os.environ, "PATH": SEARCH_PATH, **plan.environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            await _until_open(plan.port, process, directory / "output.log")
            await asyncio.sleep(plan.settle_seconds)
            yield Server(plan.address, with_descendants([process.pid]))
        finally:
            await _end(process, plan.environment.get("ERL_EPMD_PORT"))


async def _until_open(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(UP_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection(ADDRESS, port)
            except OSError:
                if process.returncode is not None:
                    raise RuntimeError(f"server ended with {process.returncode}: {_end_of(log)}") from None
                await asyncio.sleep(LOOK_SECONDS)
            else:
                writer.close()
                return


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_SHOWN:]


async def _end(process: asyncio.subprocess.Process, name_service_port: str | None) -> None:
    """Kill the server and all it started. Erlang's name service leaves its parent: it is known by our port."""
    pids = with_descendants([process.pid])
    if name_service_port:
        for other in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if other.info["name"] == "epmd" and other.environ().get("ERL_EPMD_PORT") == name_service_port:
                    pids.add(other.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
