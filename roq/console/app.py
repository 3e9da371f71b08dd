"""The application: routes, errors as problems, the pages, the document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from roq.console import cluster_routes, follow_routes, message_routes, queue_routes, session_routes, work_routes
from roq.console.answers import JSON_TYPE
from roq.console.context import Console
from roq.console.errors import NothingHere
from roq.console.gate import Gate
from roq.console.openapi import document
from roq.console.problem import PROBLEM_TYPE, problem_of
from roq.errors import InvalidConfiguration, RoqError

STATIC = Path(__file__).with_name("static")
ROUTERS = (session_routes, cluster_routes, queue_routes, work_routes, message_routes, follow_routes)
RETRY_STATUS = (429, 503)


def build(console: Console) -> Gate:
    """ASGI, gate included."""
    app = FastAPI(title="roq console", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.console = console
    for module in ROUTERS:
        app.include_router(module.router)
    _serve_pages(app)
    _tell_problems(app)
    return Gate(app, console.listening)


def _serve_pages(app: FastAPI) -> None:
    told: dict[str, bytes] = {}

    @app.get("/v1/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if "document" not in told:
            told["document"] = json.dumps(document(app)).encode()
        return Response(told["document"], media_type=JSON_TYPE)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False), "static")


def problem_answer(connection: HTTPConnection, error: RoqError) -> Response:
    """To who asked."""
    problem = problem_of(error, connection.url.path)
    headers = {"retry-after": "1"} if problem.status in RETRY_STATUS else {}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(problem), problem.status, headers, PROBLEM_TYPE)


def _tell_problems(app: FastAPI) -> None:
    async def refused(request: Request, error: Any) -> Response:
        return problem_answer(request, error)

    async def unreadable(request: Request, error: Any) -> Response:
        told = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
        return problem_answer(request, InvalidConfiguration(told))

    async def not_here(request: Request, error: Any) -> Response:
        made = NothingHere(f"{request.method} {request.url.path}: {error.detail}")
        response = problem_answer(request, made)
        response.status_code = error.status_code
        return response

    async def failed(request: Request, error: Any) -> Response:  # the gate writes it down
        return problem_answer(request, RoqError("the console failed at this: its log says how"))

    app.add_exception_handler(RoqError, refused)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(HTTPException, not_here)
    app.add_exception_handler(Exception, failed)
