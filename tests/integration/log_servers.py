"""Real servers of logs, PostgreSQL's and NATS's, each on a port and in a folder of its own; stopped, killed and started again.

`make test` installs them (tools/setup.sh servers). Not covered: clusters of several of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from roq.testing.freezing import freeze
from tests.harness.ports import free_port, own_address

UP_SECONDS = 30.0
LOOK_SECONDS = 0.05
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
NATS = shutil.which("nats-server", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
SECRET = "hunter%2F2"  # as an address has it
USER = "postgres" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root


class LogServer:
    """One server. kind: the scheme of its addresses."""

    kind = ""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"roq-{self.kind}-"))
        self.folder.chmod(0o755)
        self.host = own_address()
        self.port = free_port(self.host)
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, name: str, options: str = "") -> str:
        """Of a work queue on it."""
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it serves."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, user=self._user(), start_new_session=True)
        deadline = time.monotonic() + UP_SECONDS
        while not self._serves():
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(LOOK_SECONDS)

    def _user(self) -> str | None:
        return None

    def _serves(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1.0):
            return True
        return False

    def end(self, number: signal.Signals) -> None:
        """Send a signal; returns when it and its children are gone."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            self._process.send_signal(number)
            self._process.wait(UP_SECONDS)
            gone, alive = psutil.wait_procs(family, UP_SECONDS)
            assert not alive, (gone, alive)

    def crash(self) -> None:
        """It goes without a word; what it had confirmed it has."""
        self.end(signal.SIGKILL)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still."""
        assert self._process is not None
        family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        freeze(*[one.pid for one in family])
        try:
            yield
        finally:
            for one in family:
                one.resume()

    def put_back(self, name: str, keep: int, work: Callable[[], None]) -> None:
        """It does `work`, and is then as it was before, when the log of this name had so many entries."""
        raise NotImplementedError

    def said(self) -> str:
        """The end of its log."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Of a constructor: nobody has the object to close yet."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stopped, and its folder gone."""
        try:
            if self._process is not None and self._process.poll() is None:
                self.end(signal.SIGTERM if self.kind == "jetstream" else signal.SIGINT)
        finally:
            shutil.rmtree(self.folder)


class PostgresServer(LogServer):
    """User `roq` needs no password, user `strict` needs SECRET and has the database `strict`, user `guest` may make nothing."""

    kind = "postgresql"

    def __init__(self) -> None:
        if not POSTGRES:
            pytest.fail("PostgreSQL's server is not here: tools/setup.sh servers (on Debian: apt-get install postgresql)")
        super().__init__()
        self._bin = POSTGRES[-1]
        self._data = self.folder / "data"
        if USER is not None:
            shutil.chown(self.folder, USER)
        initdb = [str(self._bin / "initdb"), "-D", str(self._data), "-U", "roq", "--auth=trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*initdb, "--no-locale"], check=True, capture_output=True, user=self._user())
        rules = self._data / "pg_hba.conf"
        rules.write_text(
            f"host all strict {self.host}/32 scram-sha-256\n" + rules.read_text() + "host all all 127.0.0.0/8 trust\n"
        )
        with self._closed_on_failure():
            self.start()
            with psycopg.connect(self.dsn(), autocommit=True) as connection:
                connection.execute("CREATE USER strict PASSWORD 'hunter/2'")
                connection.execute("CREATE USER guest")
                connection.execute("CREATE DATABASE strict OWNER strict")

    def _user(self) -> str | None:
        return USER

    def dsn(self, user: str = "roq") -> str:
        """Of the database."""
        return f"postgresql://{user}@{self.host}:{self.port}/postgres"

    def address(self, name: str, options: str = "") -> str:
        return f"{self.dsn()}?queue={name}{'&' if options else ''}{options}"

    def _command(self) -> list[str]:
        settings = (f"listen_addresses={self.host}", f"unix_socket_directories={self.folder}", "max_connections=200")
        flags = [part for setting in settings for part in ("-c", setting)]
        return [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port), *flags]

    def _serves(self) -> bool:
        try:
            psycopg.connect(self.dsn(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def put_back(self, name: str, keep: int, work: Callable[[], None]) -> None:
        work()
        with psycopg.connect(self.dsn()) as database:
            found = database.execute("SELECT id FROM roq.logs WHERE name = %s", (name,)).fetchone()
            assert found is not None
            database.execute(f"DELETE FROM roq.entries_{found[0]} WHERE position > {keep}".encode())
            database.execute("UPDATE roq.logs SET last = %s WHERE id = %s", (keep, found[0]))

    def crash(self) -> None:
        """SIGQUIT: every process of it ends at once, with nothing written; SIGKILL would leave children for a while."""
        self.end(signal.SIGQUIT)


class NatsServer(LogServer):
    """A single server with JetStream."""

    kind = "jetstream"

    def __init__(self) -> None:
        if NATS is None:
            pytest.fail("NATS's server is not here: tools/setup.sh servers (on Debian: apt-get install nats-server)")
        super().__init__()
        self._configuration = self.folder / "nats.conf"
        self._configuration.write_text(
            f"listen: {self.host}:{self.port}\njetstream {{ store_dir: {self.folder}/store }}\n"
            'no_auth_user: roq\nauthorization { users: [ {user: roq, password: roq}, {user: strict, password: "hunter/2"} ] }\n'
        )
        with self._closed_on_failure():
            self.start()

    def server(self, user: str = "") -> str:
        """As its driver takes it."""
        return f"jetstream://{user}{'@' if user else ''}{self.host}:{self.port}"

    def address(self, name: str, options: str = "") -> str:
        return f"{self.server()}/{name}{'?' if options else ''}{options}"

    def put_back(self, name: str, keep: int, work: Callable[[], None]) -> None:
        store, old = self.folder / "store", self.folder / "old"
        self.end(signal.SIGTERM)
        shutil.copytree(store, old)
        self.start()
        work()
        self.end(signal.SIGTERM)
        shutil.rmtree(store)
        old.rename(store)
        self.start()

    def _command(self) -> list[str]:
        assert NATS is not None
        return [NATS, "-c", str(self._configuration)]


SERVERS: dict[str, type[LogServer]] = {"postgresql": PostgresServer, "jetstream": NatsServer}
