"""The OpenAPI document: FastAPI's paths, with the shapes of the structs that travel. No page shows it: that would load scripts
from elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from roq.cli.recorded_names import DurableRow, ProducerRow
from roq.cli.shuffle import ShuffleRow
from roq.cli.tapes import TapeRow
from roq.client.history import QueueHistory
from roq.client.overview import HostRow, QueueDetail, QueueRow
from roq.console.answers import REFERENCE
from roq.console.cluster_routes import AccessView, ClusterHealth, LogTail, ShownHost, ZooKeeperView
from roq.console.desk import DeskOutcome, DeskView, WorkQueueView
from roq.console.follow_routes import FollowedAnswer
from roq.console.letters import ShownTask
from roq.console.message_routes import NewMessage, PublishedMessage
from roq.console.outlet import LostMessages, StreamedMessage
from roq.console.problem import Problem
from roq.console.queue_routes import KpiSample, NewPolicy, NewQueue, PolicyView, ProposedPolicy, QueuePage, WhatIfView
from roq.console.session_routes import PresentedCard, SessionView
from roq.console.stores import StoreRow
from roq.console.summary import ClusterSummary
from roq.console.work_routes import ChosenLetters, EditedLetter, RedrivenLetter, WorkQueuePage
from roq.runtime.installation import installed_version

SHAPES = (
    *(
        AccessView,
        ChosenLetters,
        ClusterHealth,
        ClusterSummary,
        DeskView,
        DeskOutcome,
        DurableRow,
        EditedLetter,
        FollowedAnswer,
    ),
    *(
        HostRow,
        KpiSample,
        LogTail,
        LostMessages,
        NewMessage,
        NewPolicy,
        NewQueue,
        PolicyView,
        PresentedCard,
        Problem,
        ProducerRow,
    ),
    *(ProposedPolicy, PublishedMessage, QueueDetail, QueueHistory, QueuePage, QueueRow, RedrivenLetter, SessionView, ShownHost),
    *(ShownTask, ShuffleRow, StoreRow, StreamedMessage, TapeRow, WhatIfView, WorkQueuePage, WorkQueueView, ZooKeeperView),
)
DESCRIPTION = (
    "A RoQ cluster over HTTP. Rates are per second, times seconds since 1970, sizes bytes, fractions 0 to 1. Errors are "
    "problems of RFC 9457 with RoQ's name for them and what to do. What changes something needs a console that is writable, "
    "and either `Authorization: Bearer` with the token of POST /v1/session, or its cookie with X-CSRF-Token."
)


def document(app: FastAPI) -> dict[str, Any]:
    """All of it."""
    made = get_openapi(title="roq console", version=installed_version(), description=DESCRIPTION, routes=app.routes)
    _, shapes = msgspec.json.schema_components(SHAPES, ref_template=REFERENCE)
    components = made.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **shapes}
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}, {}]
    return made
