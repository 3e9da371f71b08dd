"""Every program and command that README.md and docs show is run by a test; every file that a document names is there.

RUN_BY names it. Not covered: pictures (mermaid), what stands within a sentence, docs/spec (tests/model/test_spec.py runs spin).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness.documented import ROOT, blocks

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "spec")
DOCUMENTS = ["README.md", *PAGES]
NO_PROGRAM = {"mermaid"}

HERE, EXTRAS, SPARK = "tests/integration/test_documented.py", "tests/interop/test_extras.py", "tests/spark/test_documented.py"
HISTORY = "tests/spark/test_pipeline_history.py"
RECORDED, TAPES = "tests/integration/test_read.py", "tests/spark/test_tape_source.py"
SIMULATION, TUTORIALS = "tests/simulation/test_documented.py", "tests/integration/test_tutorials.py"
CLUSTER, DEMO = "tests/spark/test_pipeline_cluster.py", "tests/integration/test_cli.py"
COMPOSE = "tests/failure/test_compose.py"
# (document, heading, number under it) -> who runs it. A block whose lines need a different context has several.
FLEET, PROVIDERS = "tests/integration/test_fleet.py", "tests/unit/test_providers.py::test_the_document_s_files"
SECURED = "tests/integration/test_secured_cluster.py"
WHERE = "tests/integration/test_where.py"
LOGS = "tests/integration/test_shared_log_queues.py"
BROWSER = "tests/integration/test_console_browser.py"
RUN_BY = {
    ("README.md", "Try it", 1): [f"{HERE}::test_the_demo_is_as_told", f"{DEMO}::test_the_demo_passes"],  # make test runs them
    ("README.md", "A folder is a queue", 1): [f"{EXTRAS}::test_a_work_queue_needs_no_extra"],
    ("README.md", "A folder is a queue", 2): [f"{EXTRAS}::test_a_work_queue_needs_no_extra"],
    ("README.md", "A cluster", 1): [f"{EXTRAS}::test_a_cluster_on_this_machine_and_the_ten_lines"],
    ("docs/failure-kit.md", "The failure kit", 1): ["tests/integration/test_chaos.py::test_the_commands_of_the_document_run"],
    ("docs/failure-kit.md", "The history, for other checkers", 1): [
        "tests/unit/test_chaos_edn.py::test_the_document_s_lines_are_such_a_history"
    ],
    ("docs/shuffle.md", "A program", 1): [f"{EXTRAS}::test_a_shuffle"],
    ("docs/existing-logs.md", "A program", 1): [f"{LOGS}::test_the_document_s_program_runs"],
    ("docs/existing-logs.md", "PostgreSQL", 1): [f"{LOGS}::test_who_only_uses_queues_needs_less"],
    ("docs/existing-logs.md", "PostgreSQL", 2): [f"{LOGS}::test_a_queue_is_removed_with_its_log"],
    ("docs/operations.md", "Start a cluster", 1): [f"{HERE}::test_a_cluster_is_started_by_hand"],
    ("docs/operations.md", "Start a cluster", 2): [f"{HERE}::test_a_host_would_be_installed"],
    ("docs/howto/test-your-application.md", "Test your application", 1): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("docs/howto/test-your-application.md", "Test your application", 2): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("docs/howto/test-your-application.md", "Test your application", 3): [f"{EXTRAS}::test_an_application_s_own_tests"],
    ("docs/howto/dead-letters.md", "Decide when", 1): [f"{TUTORIALS}::test_dead_letters"],
    ("docs/howto/dead-letters.md", "Decide when", 2): [f"{TUTORIALS}::test_dead_letters"],
    ("docs/howto/dead-letters.md", "From the shell", 1): [f"{TUTORIALS}::test_dead_letters"],
    ("docs/howto/migrate.md", "From Celery", 1): [f"{TUTORIALS}::test_coming_from_celery"],
    ("docs/howto/migrate.md", "From Celery", 2): [f"{TUTORIALS}::test_coming_from_celery"],
    ("docs/howto/migrate.md", "From RabbitMQ", 1): [f"{TUTORIALS}::test_coming_from_rabbitmq"],
    ("docs/howto/migrate.md", "From RabbitMQ", 2): [f"{TUTORIALS}::test_coming_from_rabbitmq"],
    ("docs/howto/migrate.md", "From Kafka", 1): [f"{TUTORIALS}::test_coming_from_kafka"],
    ("docs/howto/migrate.md", "From Kafka", 2): [f"{TUTORIALS}::test_coming_from_kafka"],
    ("docs/tutorials/folder.md", "Put", 1): [f"{TUTORIALS}::test_a_folder"],
    ("docs/tutorials/folder.md", "Put", 2): [f"{TUTORIALS}::test_a_folder"],
    ("docs/tutorials/folder.md", "Work", 1): [f"{TUTORIALS}::test_a_folder"],
    ("docs/tutorials/folder.md", "Work", 2): [f"{TUTORIALS}::test_a_folder"],
    ("docs/tutorials/folder.md", "Look", 1): [f"{TUTORIALS}::test_a_folder"],
    ("docs/tutorials/cluster.md", "Subscribe", 1): [f"{TUTORIALS}::test_exchanges_come_and_go"],
    ("docs/tutorials/cluster.md", "Publish", 1): [f"{TUTORIALS}::test_exchanges_come_and_go"],
    ("docs/tutorials/cluster.md", "Scale, while it runs", 1): [f"{TUTORIALS}::test_exchanges_come_and_go"],
    ("docs/tutorials/cluster.md", "Scale, while it runs", 2): [f"{TUTORIALS}::test_exchanges_come_and_go"],
    **{
        ("docs/tutorials/recorded-queue.md", heading, number): [f"{TUTORIALS}::test_a_queue_that_remembers"]
        for heading, count in {"Store": 3, "Come late": 2, "Come back": 2, "Share": 3}.items()
        for number in range(1, count + 1)
    },
    ("docs/tutorials/spark.md", "A queue as a stream", 1): ["tests/spark/test_tutorial.py::test_the_tutorial"],
    ("docs/tutorials/spark.md", "A queue as a stream", 2): ["tests/spark/test_tutorial.py::test_the_tutorial"],
    ("docs/cli.md", "Which cluster", 1): ["tests/unit/test_cli_context.py::test_what_the_document_shows"],
    ("docs/cli.md", "What happens", 1): ["tests/integration/test_events.py::test_the_document_s_program"],
    ("docs/deployment.md", "Compose", 1): [f"{COMPOSE}::test_a_secured_cluster_that_loses_a_host_and_nothing_else"],
    ("docs/deployment.md", "Compose", 2): [f"{COMPOSE}::test_a_secured_cluster_that_loses_a_host_and_nothing_else"],
    ("docs/deployment.md", "Kubernetes", 1): [
        "tests/unit/test_kubernetes.py::test_the_cards_that_the_document_makes_are_those_that_the_pods_take"
    ],
    ("docs/elasticity.md", "Try it", 1): [f"{FLEET}::test_what_the_document_shows"],
    ("docs/elasticity.md", "Allow it", 1): [f"{FLEET}::test_what_the_document_shows"],
    **{("docs/elasticity.md", "Say where from", number): [PROVIDERS] for number in (1, 2, 3)},
    ("docs/security.md", "From nothing to a secured cluster", 1): [f"{SECURED}::test_what_the_document_shows"],
    ("docs/recorded-queues.md", "Recorded queues", 1): [f"{HERE}::test_a_queue_is_recorded"],
    ("docs/recorded-queues.md", "Recorded queues", 2): [f"{HERE}::test_a_queue_is_recorded"],
    ("docs/recorded-queues.md", "Producers", 1): ["tests/integration/test_producers.py::test_the_loader_of_the_documents"],
    ("docs/filters.md", "Content filters", 1): [f"{WHERE}::test_what_the_document_shows"],
    ("docs/filters.md", "Content filters", 2): [f"{WHERE}::test_what_the_document_shows"],
    ("docs/request-reply.md", "Requests", 1): [f"{HERE}::test_requests_are_answered"],
    ("docs/request-reply.md", "Requests", 2): [f"{HERE}::test_requests_are_answered"],
    ("docs/backup.md", "Backups", 1): ["tests/integration/test_backup.py::test_what_the_document_shows"],
    ("docs/tracing.md", "Tracing", 1): ["tests/integration/test_tracing.py::test_what_the_document_shows"],
    ("docs/groups.md", "Groups", 1): ["tests/integration/test_cli_groups.py::test_what_the_document_shows"],
    ("docs/groups.md", "Groups", 2): ["tests/integration/test_cli_groups.py::test_what_the_document_shows"],
    ("docs/history.md", "The cluster's history", 1): ["tests/integration/test_history.py::test_what_the_document_shows"],
    ("docs/history.md", "The cluster's history", 2): ["tests/integration/test_history.py::test_what_the_document_shows"],
    ("docs/transactions.md", "Transactions", 1): ["tests/integration/test_transactions.py::test_what_the_document_shows"],
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
    ("docs/spark.md", "archive", 2): [f"{HISTORY}::test_messages_are_archived_once_and_where_leaves_out_the_others"],
    ("docs/spark.md", "kpi", 2): [f"{HISTORY}::test_the_history_of_a_cluster_becomes_a_report_and_the_next_run_goes_on"],
    ("docs/spark.md", "sort", 1): [f"{SPARK}::test_sort"],
    ("docs/spark.md", "dead_letters", 1): [f"{CLUSTER}::test_what_the_documents_do_on_a_cluster"],
    ("docs/arrow-and-spark.md", "Recorded queues as data", 1): [f"{RECORDED}::test_reading_as_the_document_does"],
    ("docs/arrow-and-spark.md", "Spark: a batch", 1): [f"{TAPES}::test_the_document"],
    ("docs/arrow-and-spark.md", "Spark: a stream", 1): [f"{TAPES}::test_the_document"],
    ("docs/console.md", "The console", 1): [f"{BROWSER}::test_what_the_document_shows"],
    ("docs/console.md", "REST and streams", 1): [f"{BROWSER}::test_what_the_document_shows"],
    ("docs/console.md", "REST and streams", 2): [f"{BROWSER}::test_what_the_document_shows"],
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
