"""Every program and command that README.md and docs/*.md show is run by a test; every file that a document names is there.

RUN_BY names it. Not covered: pictures (mermaid), and what stands within a sentence.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness.documented import ROOT, blocks

DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NO_PROGRAM = {"mermaid"}

HERE, EXTRAS, SPARK = "tests/integration/test_documented.py", "tests/interop/test_extras.py", "tests/spark/test_documented.py"
RECORDED, TAPES = "tests/integration/test_read.py", "tests/spark/test_tape_source.py"
SIMULATION = "tests/simulation/test_documented.py"
CLUSTER, DEMO = "tests/spark/test_pipeline_cluster.py", "tests/integration/test_cli.py"
# (document, heading, number under it) -> who runs it. A block whose lines need different surroundings has several.
SECURED = "tests/integration/test_secured_cluster.py"
WHERE = "tests/integration/test_where.py"
RUN_BY = {
    ("README.md", "Try it", 1): [f"{HERE}::test_the_demo_is_as_told", f"{DEMO}::test_the_demo_passes"],  # make test runs them
    ("README.md", "Ten lines", 1): [f"{EXTRAS}::test_a_cluster_on_this_machine_and_the_ten_lines"],
    ("README.md", "Work queues", 1): [f"{EXTRAS}::test_a_work_queue_needs_no_extra"],
    ("README.md", "Queues that remember", 1): [f"{HERE}::test_a_queue_that_remembers"],
    ("README.md", "Shuffle", 1): [f"{EXTRAS}::test_a_shuffle"],
    ("README.md", "Start a cluster", 1): [f"{HERE}::test_a_cluster_is_started_by_hand"],
    ("README.md", "Start a cluster", 2): [f"{HERE}::test_a_host_would_be_installed"],
    ("README.md", "Test your application", 1): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("README.md", "Test your application", 2): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("README.md", "Test your application", 3): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("docs/security.md", "From nothing to a secured cluster", 1): [f"{SECURED}::test_what_the_document_shows"],
    ("docs/recorded-queues.md", "Recorded queues", 1): [f"{HERE}::test_a_queue_is_recorded"],
    ("docs/recorded-queues.md", "Recorded queues", 2): [f"{HERE}::test_a_queue_is_recorded"],
    ("docs/filters.md", "Content filters", 1): [f"{WHERE}::test_what_the_document_shows"],
    ("docs/filters.md", "Content filters", 2): [f"{WHERE}::test_what_the_document_shows"],
    ("docs/request-reply.md", "Requests", 1): [f"{HERE}::test_requests_are_answered"],
    ("docs/request-reply.md", "Requests", 2): [f"{HERE}::test_requests_are_answered"],
    ("docs/groups.md", "Groups", 1): ["tests/integration/test_cli_groups.py::test_what_the_document_shows"],
    ("docs/groups.md", "Groups", 2): ["tests/integration/test_cli_groups.py::test_what_the_document_shows"],
    ("docs/policies.md", "Scaling policies", 1): [f"{HERE}::test_policies_from_the_shell"],
    ("docs/policies.md", "The file", 1): [f"{HERE}::test_policies_from_the_shell"],
    ("docs/policies.md", "Trying one out", 1): [f"{HERE}::test_policies_from_the_shell"],
    ("docs/simulation.md", "The simulated cluster", 1): [f"{SIMULATION}::test_hunting_and_showing_a_run"],
    ("docs/spark.md", "RoQ and Spark", 1): [f"{SPARK}::test_a_session_knows_the_formats"],
    ("docs/spark.md", "A complete program", 1): [
        f"{EXTRAS}::test_a_spark_program_and_after_it_the_plain_one_in_the_same_folder"
    ],
    ("docs/spark.md", 'format("roq")', 1): [f"{SPARK}::test_a_stream_from_one_queue_to_another"],
    ("docs/spark.md", "archive", 1): [f"{SPARK}::test_archive", f"{CLUSTER}::test_what_the_documents_do_on_a_cluster"],
    ("docs/spark.md", "kpi", 1): [f"{SPARK}::test_kpi", f"{CLUSTER}::test_what_the_documents_do_on_a_cluster"],
    ("docs/spark.md", "sort", 1): [f"{SPARK}::test_sort"],
    ("docs/spark.md", "dead_letters", 1): [f"{CLUSTER}::test_what_the_documents_do_on_a_cluster"],
    ("docs/arrow-and-spark.md", "Recorded queues as data", 1): [f"{RECORDED}::test_reading_as_the_document_does"],
    ("docs/arrow-and-spark.md", "Spark: a batch", 1): [f"{TAPES}::test_the_document"],
    ("docs/arrow-and-spark.md", "Spark: a stream", 1): [f"{TAPES}::test_the_document"],
    ("docs/work-queues.md", "Workers", 1): [f"{HERE}::test_a_worker_with_a_handler"],
    ("docs/work-queues.md", "From the shell", 1): [f"{HERE}::test_tasks_from_the_shell"],
}


LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(path: Path) -> None:
    assert [target for target in LINK.findall(path.read_text()) if not (path.parent / target).exists()] == []


def test_every_program_and_command_is_run() -> None:
    shown = {(each.document, each.heading, each.number) for name in DOCUMENTS for each in blocks(name)}
    pictures = {
        (each.document, each.heading, each.number) for name in DOCUMENTS for each in blocks(name) if each.language in NO_PROGRAM
    }
    assert sorted(shown - pictures - RUN_BY.keys()) == [], "nobody runs these"
    assert sorted(RUN_BY.keys() - shown) == [], "these are not shown any more"


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def functions(path: str) -> dict[str, str]:
    """name -> source"""
    found = ast.parse(source(path)).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: ast.get_source_segment(source(path), node) or "" for node in found if isinstance(node, kinds)}


@pytest.mark.parametrize(("place", "names"), RUN_BY.items())
def test_who_runs_it_is_there_and_reads_it(place: tuple[str, str, int], names: list[str]) -> None:
    document, heading, number = place
    for name in names:
        path, _, test = name.partition("::")
        assert test in functions(path), f"{path} has no {test}"
    reading = [functions(path)[test] for path, _, test in (name.partition("::") for name in names)]
    assert any(f'"{heading}"' in text or f"'{heading}'" in text for text in reading), (
        f"none reads {document}, {heading}, {number}"
    )
