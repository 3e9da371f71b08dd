"""`roq host …`: the machines of the cluster; `install` writes a host's systemd units and the daemons' configuration files.

Not covered: installing RoQ itself.
"""

from __future__ import annotations

import asyncio
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
import uvloop

from roq.cli import host_leave
from roq.cli.address import ClusterOption, JsonOption, cluster_address, entered, with_cluster
from roq.cli.completion import host_names
from roq.cli.host_disk import forget_disk
from roq.cli.host_leave import HostArgument
from roq.cli.output import console, print_done, print_found, print_json, say, table, working
from roq.cli.status import host_table
from roq.client.cluster import Cluster
from roq.client.overview import host_rows
from roq.config import DRAIN_SECONDS_MAX, listen_place
from roq.coordination.link import parse_address
from roq.errors import (
    CallError,
    DeadlineExceeded,
    HostNotFound,
    InvalidConfiguration,
    ProcessFailed,
    TemporaryError,
    Unavailable,
)
from roq.ids import check_name
from roq.runtime.backoff import delays
from roq.runtime.installation import install as extra
from roq.runtime.installation import missing
from roq.runtime.rpc import RpcClient
from roq.wire import hcm as wire
from roq.wire.assignment import RunningProcess
from roq.wire.card import SecurityMode
from roq.wire.gcm import HostInfo

ASK_SECONDS = 5.0
DRAIN_SECONDS = 30.0  # others have taken over by then, or have no room
STOP_SECONDS = 40.0  # behind that: an HCM gives its processes 15 s, and ZooKeeper may be slow to hear of it
AGAIN_SECONDS = 5.0  # an HCM that is started again is there within a second or two, on a busy machine in four
AGAIN_PAUSE_SECONDS = 0.2
UNITS, CONFIGURATION, USERS = Path("etc/systemd/system"), Path("etc/roq"), Path("etc/sysusers.d/roq.conf")
STATE = Path("/var/lib/roq")  # StateDirectory=roq
GCM_PORT, GCM_BROADCAST_PORT, HCM_PORT = 5500, 5501, 5510  # fixed, so that a firewall can let them pass
SYSTEMCTL_SECONDS = 120.0  # the units become ready, or not
PLAIN = re.compile(r"[A-Za-z0-9_./+:-]+")

app = typer.Typer(help="Hosts: list, show, cordon, drain, evacuate, stop, replace the disk of, install.", no_args_is_help=True)


@app.command("ls")
def list_hosts(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List hosts."""

    async def work(connected: Cluster) -> tuple[HostInfo, ...]:
        return tuple(await connected.hosts())

    print_found(host_rows(with_cluster(cluster, work)), json, host_table)


@app.command("show")
def show(name: HostArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show a host and its processes."""

    async def work(connected: Cluster) -> HostInfo:
        return await _described(connected, name)

    info = with_cluster(cluster, work)
    processes = info.report.processes if info.report else ()
    if json:
        print_json({"host": host_rows([info])[0], "processes": processes})
        return
    out = console()
    out.print(host_table(host_rows([info])))
    rows = [
        (one.name, str(one.state), str(one.pid), _ports(one.ports), str(one.restarts), one.error)
        for one in sorted(processes, key=lambda one: one.name)
    ]
    out.print()
    out.print(table("Processes", ("PROCESS", "STATE", ">PID", "PORTS", ">RESTARTS", "ERROR"), rows))


def _ports(ports: dict[str, int]) -> str:
    return " ".join(f"{role}:{port}" for role, port in ports.items())


@app.command("cordon")
def cordon(name: HostArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Place nothing new on a host. What runs there goes on; only ranges of shuffles move to other hosts."""
    _set_cordoned(name, cluster, cordoned=True, json=json)


@app.command("uncordon")
def uncordon(name: HostArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Place new things on a host again."""
    _set_cordoned(name, cluster, cordoned=False, json=json)


app.command("drain")(host_leave.drain)
app.command("evacuate")(host_leave.evacuate)
app.command("rebalance")(host_leave.rebalance)


def _set_cordoned(name: str, cluster: str | None, *, cordoned: bool, json: bool) -> None:
    async def work(connected: Cluster) -> HostInfo:
        await connected.cordon_host(name, cordoned)
        return await _described(connected, name)

    info = with_cluster(cluster, work)
    runs = len(info.report.processes) if info.report else 0
    goes_on = f"; the {runs} processes that run there go on" if runs else ""
    text = f"nothing new is placed on {name}{goes_on}" if cordoned else f"new things are placed on {name} again"
    print_done({"host": name, "cordoned": cordoned, "processes": runs}, json, text)


@app.command("stop")
def stop(
    name: Annotated[
        str,
        typer.Argument(metavar="HOST", help="Name of the host.", show_default="this machine's name", autocompletion=host_names),
    ] = platform.node(),
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0, max=DRAIN_SECONDS_MAX, help="So long at most, what runs there moves to other hosts first; 0: not at all."
        ),
    ] = DRAIN_SECONDS,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Stop a host: its processes move to other hosts, or are stopped in order, then its `roq-hcm`.

    A signal stops `roq-hcm` alone and leaves the processes to the next one, for upgrades without a pause."""

    async def work(connected: Cluster) -> HostInfo:
        described = await _described(connected, name)
        with working(f"stopping {name}"):
            return await _stopped(connected, described, drain_seconds)

    info = with_cluster(cluster, work)
    runs = len(info.report.processes) if info.report else 0
    text = f"{name} is stopped: roq-hcm and the {runs} processes that ran there"
    print_done({"host": name, "stopped": True, "processes": runs}, json, text)


@app.command("new-disk")
def new_disk(name: HostArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Let a stopped host start with another, empty disk: the one that its store had is lost for good.

    What that held is copied again from other hosts when it starts; `roq doctor` says when that is done. One host after the
    other. In a secured cluster it takes a card of a host."""
    forgotten = uvloop.run(forget_disk(entered(cluster), name))
    text = f"{name} may start with an empty disk; `roq doctor` then says when all copies are there again"
    if not forgotten:
        text = f"no disk of {name} is known: it starts with whatever it has"
    print_done({"host": name, "forgotten": forgotten}, json, text)


async def _described(connected: Cluster, name: str) -> HostInfo:
    found = await _seen(connected, name)
    if found is None:
        raise HostNotFound(f"no host of name {name!r} is in the cluster")
    return found


async def _stopped(connected: Cluster, info: HostInfo, drain_seconds: float) -> HostInfo:
    """Ask its HCM to stop it, and wait until the cluster has seen the end; the host as it was."""
    if not info.alive:
        again = "if processes of it are left, start its `roq-hcm` once more, which adopts them, then stop it"
        raise Unavailable(f"host {info.host} is away already; {again}")
    client = RpcClient(f"tcp://{info.address}:{info.port}", wire.Reply)
    try:
        await client.request(wire.ShutdownHost("roq host stop", drain_seconds), wire.OrderTaken, ASK_SECONDS)
    finally:
        client.close()
    await _gone(connected, info, drain_seconds + STOP_SECONDS)
    await _away_for_good(connected, info)
    return info


async def _gone(connected: Cluster, info: HostInfo, timeout_seconds: float) -> None:
    """Returns when the cluster has seen this life of the host end with nothing left, or the next one begin."""
    left: tuple[RunningProcess, ...] = ()
    try:
        async with asyncio.timeout(timeout_seconds):
            for delay in delays(0.05, 0.5):
                now = await _seen(connected, info.host)
                left = now.report.processes if now is not None and now.report is not None else ()
                if now is None or (not now.alive and not left) or _next_life(info, now):
                    return
                await asyncio.sleep(delay)
    except TimeoutError:
        pass
    names = ", ".join(sorted(process.name for process in left)) or "its roq-hcm"
    raise DeadlineExceeded(f"host {info.host} is not stopped after {timeout_seconds:g} s: {names} still there")


async def _away_for_good(connected: Cluster, info: HostInfo) -> None:
    """Raises TemporaryError if the host comes back at once: somebody started its HCM again."""
    until = time.monotonic() + AGAIN_SECONDS
    while True:
        now = await _seen(connected, info.host)
        if now is not None and now.alive:
            units = "under systemd install this version's units with `roq host install`, then stop the host once more"
            other = "under another service manager, and in a container, stop it there"
            raise TemporaryError(f"host {info.host} was stopped, and its service manager started it again: {units}; {other}")
        if time.monotonic() > until:
            return
        await asyncio.sleep(AGAIN_PAUSE_SECONDS)


async def _seen(connected: Cluster, name: str) -> HostInfo | None:
    return next((one for one in await connected.hosts() if one.host == name), None)


def _next_life(before: HostInfo, now: HostInfo) -> bool:
    """Whether another HCM is at work on the host."""
    if not now.alive or now.report is None or before.report is None:
        return False
    return now.report.incarnation != before.report.incarnation


class File(NamedTuple):
    """One file to write. kept: if it is there already it stays as it is, unless forced."""

    path: Path
    text: str
    kept: bool = False


def files(
    *,
    zookeeper: str,
    host: str,
    address: str,
    user: str,
    programs: Path,
    prefix: Path,
    gcm: bool,
    new_user: bool,
    security: SecurityMode,
    metrics: str | None = None,
) -> list[File]:
    """All files of a host, below `prefix`; gcm: with a GCM on it; metrics: where its HCM serves them, `[HOST]:PORT`. Raises
    CallError for values the daemons would refuse."""
    check_name(host, "host")
    if re.fullmatch(r"[a-z_][a-z0-9_-]*", user) is None:
        raise InvalidConfiguration(f"no user name: {user!r}")
    common: dict[str, str | int] = {"zookeeper": str(parse_address(zookeeper)), "address": address}
    hcm_values = common | {"host": host, "port": HCM_PORT, "state_dir": str(STATE)}
    if metrics is not None:
        listen_place(metrics, "--metrics")
        hcm_values["metrics"] = metrics
    made = _daemon("hcm", hcm_values | _security("hcm", security), user, programs, prefix)
    if gcm:
        gcm_values = common | {"port": GCM_PORT, "broadcast_port": GCM_BROADCAST_PORT}
        made += _daemon("gcm", gcm_values | _security("gcm", security), user, programs, prefix)
    if new_user:
        made.append(File(prefix / USERS, f'u {user} - "RoQ" {STATE}\n'))
    return made


def _security(name: str, security: SecurityMode) -> dict[str, str | int]:
    card: dict[str, str | int] = {"card": str(_card(name))} if security is not SecurityMode.NONE else {}
    return card | ({"security": str(security)} if security is not SecurityMode.CARDS else {})


def _card(name: str) -> Path:
    """Of a daemon."""
    return Path("/") / CONFIGURATION / f"{name}.card"


def _cards(gcm: bool, host: str, *, check: bool) -> list[Path]:
    """Those that the host needs. check: raises InvalidConfiguration if one is missing."""
    needed = [("hcm", "host")] + [("gcm", "gcm")] * gcm
    for name, role in needed if check else ():
        if not _card(name).exists():
            raise InvalidConfiguration(
                f"no card at {_card(name)}, nothing was written. Make it by `roq ca sign {role} {host} {name}.card` "
                "and put it there (docs/security.md); or --security none, where everybody may read and change everything"
            )
    return [_card(name) for name, _ in needed]


def _daemon(name: str, values: dict[str, str | int], user: str, programs: Path, prefix: Path) -> list[File]:
    unit = f"roq-{name}.service"
    text = resources.files(name).joinpath("systemd", unit).read_text()
    put_in = {
        "program": _word(programs / f"roq-{name}"),
        "config": _word(Path("/") / CONFIGURATION / f"{name}.toml"),
        "user": user,
    }
    text = re.sub("@([a-z]+)@", lambda found: put_in[found[1]], text.partition("\n")[2])
    head = f"# Written by `roq host install`, again each time it runs. Own changes: `systemctl edit roq-{name}`.\n"
    lines = [f"{key} = {_toml(value)}\n" for key, value in values.items()]
    heading = f"# Configuration of roq-{name}; `roq-{name} --help` shows all keys (with _ for -).\n"
    return [
        File(prefix / UNITS / unit, head + text),
        File(prefix / CONFIGURATION / f"{name}.toml", heading + "".join(lines), kept=True),
    ]


def _toml(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _word(path: Path) -> str:
    """One word of an ExecStart line."""
    text = str(path)
    if PLAIN.fullmatch(text):
        return text
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(special, written)
    return f'"{text}"'


def program_directory() -> Path:
    """Where this installation's console scripts are. Raises InvalidConfiguration if it has none, as a bare source tree."""
    places = [Path(sysconfig.get_path("scripts")), Path(sys.argv[0]).absolute().parent, Path(sys.executable).parent]
    for place in places:
        if (place / "roq-hcm").exists() and (place / "roq-gcm").exists():
            return place
    told = ", ".join(str(place) for place in dict.fromkeys(places))
    raise InvalidConfiguration(f"no roq-hcm and roq-gcm in {told}: install RoQ with pip first")


def own_address(zookeeper: str) -> str:
    """The address with which this host reaches ZooKeeper. Raises InvalidConfiguration if there is no way to it."""
    server = parse_address(zookeeper).hosts.split(",")[0]
    name, _, port = server.rpartition(":")
    try:
        kind, _, _, _, target = socket.getaddrinfo(name, int(port), socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidConfiguration(f"which address does this host have? {server}: {error}; give --address") from None


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _differences(ours: str, asked: str) -> str:
    """In what a configuration that is kept is not what was asked for, in words."""
    found = []
    for topic, keys in (("security differs", ("card", "security")), ("metrics differ", ("metrics",))):
        there, wanted = (sorted(line for line in text.splitlines() if line.startswith(keys)) for text in (ours, asked))
        if there != wanted:
            found.append(f"; its {topic}, {' '.join(wanted) or 'none'} was asked for")
    return "".join(found)


def _write(file: File, *, force: bool) -> None:
    if file.kept and not force and file.path.exists():
        differs = _differences(file.path.read_text(), file.text)
        say(f"kept {file.path} as it is; --force writes it anew{differs}")
        return
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_text(file.text)
    file.path.chmod(0o644)
    say(f"wrote {file.path}")


def _enable(units: list[str], users: list[File], cards: list[Path], user: str) -> None:
    """Start the units now and at every boot; running ones are started anew with what was written. The cards are the user's."""
    if users:
        _run("systemd-sysusers", str(users[0].path))
    for card in cards:
        shutil.chown(card, user)
        card.chmod(0o600)
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "--quiet", *units)
    _run("systemctl", "restart", *units)
    say(f"{' and '.join(units)}: running")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"`{' '.join(command)}` did not end within {SYSTEMCTL_SECONDS:g} s") from None
    except FileNotFoundError:
        raise ProcessFailed(f"no program {command[0]} here") from None
    if done.returncode:
        raise ProcessFailed(f"`{' '.join(command)}`: {(done.stderr or done.stdout).strip()}")


SecurityOption = Annotated[
    SecurityMode,
    typer.Option(help=f"cards: {_card('hcm')}, {_card('gcm').name}. none: nobody needs one. mixed: on the way to cards."),
]


def _check_possible(*, here: bool, enable: bool, metrics: str | None) -> None:
    """Raises what stands in the way, before anything is written. here: files are written, and for this machine."""
    if enable and not here:
        raise CallError("--enable starts what is written on this very host: not with --prefix or --dry-run")
    if enable and not shutil.which("systemctl"):
        raise ProcessFailed("this host has no systemd (no `systemctl`); nothing was written")
    if here and metrics is not None and missing("metrics"):
        raise InvalidConfiguration(f"--metrics needs what is not installed here, nothing was written: {extra('metrics')}")


MetricsOption = Annotated[
    str | None,
    typer.Option(metavar="[HOST]:PORT", help="Where the host serves metrics for Prometheus; else nowhere.", show_default=False),
]


@app.command("install")
def install(  # noqa: PLR0913, PLR0917 - typer gives all of them by name
    gcm: Annotated[bool, typer.Option("--gcm", help="A GCM on this host too; two or three hosts have one.")] = False,
    zookeeper: Annotated[
        str | None, typer.Option(help="ZooKeeper addresses; else as for --cluster of other commands.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Name of this host in the cluster.", show_default="its own")] = platform.node(),
    address: Annotated[
        str | None,
        typer.Option(help="To bind and to be reached at; else the one that ZooKeeper is reached with.", show_default=False),
    ] = None,
    user: Annotated[str, typer.Option(help="Who the daemons run as; made if it is missing.")] = "roq",
    prefix: Annotated[Path, typer.Option(metavar="DIR", help="Write below this directory, for packages.")] = Path("/"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite configuration files that are there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files, write nothing.")] = False,
    enable: Annotated[bool, typer.Option("--enable", help="Start the units, now and at every boot.")] = False,
    security: SecurityOption = SecurityMode.CARDS,
    metrics: MetricsOption = None,
) -> None:
    """Write this host's systemd units and configuration files."""
    _check_possible(here=prefix == Path("/") and not dry_run, enable=enable, metrics=metrics)
    cards = [] if security is SecurityMode.NONE else _cards(gcm, host, check=enable)
    cluster = cluster_address(zookeeper)
    made = files(
        zookeeper=cluster,
        host=host,
        address=address or own_address(cluster),
        user=user,
        programs=program_directory(),
        prefix=prefix,
        gcm=gcm,
        new_user=prefix != Path("/") or not _exists(user),
        security=security,
        metrics=metrics,
    )
    if dry_run:
        for file in made:
            print(f"# ----- {file.path}\n{file.text}")
        return
    for file in made:
        _write(file, force=force)
    units = [file.path.name for file in made if file.path.suffix == ".service"]
    if enable:
        _enable(units, [file for file in made if file.path == prefix / USERS], cards, user)
    elif prefix == Path("/"):
        owned = "".join(f"install -o {user} -m 600 {card.name} {card} && " for card in cards)  # made by `roq ca sign`
        say(f"now: {owned}systemctl daemon-reload && systemctl enable --now {' '.join(units)}")
