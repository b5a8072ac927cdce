"""The HTTP interface: static files, and calls that answer in JSON or with a file. Uploads are its only state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from zeropipe import __version__
from zeropipe.errors import MissingExtra

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, Response
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException
except ImportError:
    raise MissingExtra("fastapi", "app") from None

from zeropipe.app import models, plan_calls
from zeropipe.app.body import BoundedRoute
from zeropipe.app.calls import (
    Reply,
    catalog_call,
    chart_call,
    encode_json,
    error_data,
    file_call,
    simulate_call,
    upload_call,
)  # fmt: skip
from zeropipe.app.comparison import ResolvedChoice, count_work, resolve_chart, resolve_choices
from zeropipe.app.downloads import MEDIA_TYPES, require_format
from zeropipe.app.errors import Refusal, describe_errors
from zeropipe.app.guard import Guard
from zeropipe.app.job_queue import Job, JobQueue
from zeropipe.app.queues import MAX_SMALL, Disconnected, Queues
from zeropipe.app.uploads import LoadedFiles, Uploads
from zeropipe.core.limits import PAGE
from zeropipe.core.workers import WorkerError, WorkerMemoryError

BYTES_PER_ACTION = 4  # of an uploaded file, about
SLOW_FORMATS = ("png", "pdf")  # drawn by matplotlib, which takes long to import
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": models.Errors, "description": description}
    for status, description in {
        400: "The body cannot be read.",
        403: "The request comes from a page of another site, or names another host.",
        413: "The body is too large.",
        422: "A value is not valid.",
        503: "Too many requests wait; Retry-After says when to try again.",
    }.items()
}


class AsciiJSONResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode_json(content)


def create_app(*, hosts: Sequence[str] = (), schedules: Sequence[str] = (), start_worker: bool = False) -> FastAPI:
    """Create the application, for any ASGI server.

    It answers requests for IP addresses, `localhost`, and the names in `hosts`. `schedules` are the user's,
    path/to/mine.py:name. With `start_worker`, a worker process starts with the server, before the first large request.
    """
    queues = Queues(schedules)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if start_worker:
            queues.start()
        yield
        queues.close()

    app = FastAPI(
        title="zeropipe", version=__version__, docs_url=None, redoc_url=None, default_response_class=AsciiJSONResponse,
        description="Simulate and compare pipeline schedules. An error names its field and the way out.",
        lifespan=lifespan,
    )  # fmt: skip
    app.router.route_class = BoundedRoute
    app.state.queues = queues
    app.add_middleware(Guard, hosts=hosts)
    for kind, handler in (
        (Refusal, _handle_refusal), (WorkerMemoryError, _handle_memory), (RequestValidationError, _handle_invalid),
        (HTTPException, _handle_http), (Exception, _handle_failure),
    ):  # fmt: skip
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Disconnected, lambda request, error: Response(status_code=499))
    _add_compare_routes(app, Uploads(), queues)
    _add_plan_routes(app, queues)
    static = files("zeropipe.app").joinpath("static")

    @app.get("/static/cost_fields.js", include_in_schema=False)
    async def cost_fields() -> Response:
        return Response(models.cost_fields_script(), media_type="text/javascript")

    app.mount("/static", StaticFiles(directory=str(static)), name="static")
    app.mount("/viewer", StaticFiles(directory=str(files("zeropipe.viz").joinpath("viewer"))), name="viewer")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(static.joinpath("index.html")))

    @app.get("/plan", include_in_schema=False)
    async def plan_page() -> FileResponse:
        return FileResponse(str(static.joinpath("plan.html")))

    return app


def _add_compare_routes(app: FastAPI, uploads: Uploads, queues: Queues) -> None:
    def choose_queue(choices: Sequence[ResolvedChoice], more_work: int = 0) -> JobQueue:
        return queues.choose(count_work(choices) + more_work, [choice.entry for choice in choices if choice.entry])

    def find_files(body: models.CompareRequest) -> LoadedFiles:
        return uploads.get_all(choice.file for choice in body.schedules)

    @app.get("/api/schedules", response_model=models.Catalog, responses=_errors(403, 503), summary="All schedules")
    async def schedules(request: Request) -> Response:
        return _response(await queues.run(request, queues.small, Job(catalog_call)))

    @app.get(
        "/api/load", response_model=dict[str, models.QueueLoad], responses=_errors(403),
        summary="How busy the server is",
    )  # fmt: skip
    async def load() -> Response:
        return AsciiJSONResponse({name: load._asdict() for name, load in queues.load.items()})

    @app.post("/api/simulate", response_model=models.Answer, responses=ERROR_RESPONSES, summary="Simulate side by side")
    async def simulate(body: models.CompareRequest, request: Request) -> Response:
        files = find_files(body)
        queue = choose_queue(resolve_choices(body, files))
        return _response(await queues.run(request, queue, Job(simulate_call, (body, files))))

    @app.post("/api/chart", response_model=models.Chart, responses=ERROR_RESPONSES, summary="Idle time against memory")
    async def chart(body: models.SizeRequest, request: Request) -> Response:
        queue = choose_queue(resolve_chart(body))
        return _response(await queues.run(request, queue, Job(chart_call, (body,)), urgent=False))

    text = {"text/plain": {"schema": {"type": "string", "maxLength": PAGE.file_bytes, "examples": ["0F0,0B0\n"]}}}

    @app.post(
        "/api/uploads", response_model=models.UploadInfo, responses=ERROR_RESPONSES, summary="Upload a file",
        description="The body is the file: a schedule (.csv, .json), a timeline (.json) or costs (.toml, .json).",
        openapi_extra={"requestBody": {"required": True, "content": text}},
    )  # fmt: skip
    async def upload(name: models.FileName, request: Request) -> Response:
        data = await request.body()
        queue = queues.choose(len(data) // BYTES_PER_ACTION + 1)
        reply, key, loaded = await queues.run(request, queue, Job(upload_call, (name, data)))
        if loaded is not None:
            uploads.add(key, loaded)
        return _response(reply)

    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()}
    content[MEDIA_TYPES["json"]] = {"schema": {"type": "object"}}

    @app.post(
        "/api/files/{format}", response_class=Response, responses={200: {"content": content}, **ERROR_RESPONSES},
        summary="The comparison as a file",
    )  # fmt: skip
    async def download(format: models.Format, body: models.FileRequest, request: Request) -> Response:
        files = find_files(body)
        choices = resolve_choices(body, files)
        require_format(format, choices)
        queue = choose_queue(choices, MAX_SMALL if format in SLOW_FORMATS else 0)
        return _response(await queues.run(request, queue, Job(file_call, (body, format, files))))


def _add_plan_routes(app: FastAPI, queues: Queues) -> None:
    """Add calls that take seconds: they run in a worker process, and are cancelled when the browser disconnects."""
    responses = {200: {"model": dict[str, Any]}, **ERROR_RESPONSES}
    cache = plan_calls.CostsCache()

    @app.get("/api/known", responses={200: responses[200], **_errors(403, 503)}, summary="Models and GPUs for plans")
    async def known(request: Request) -> Response:
        return _response(await queues.run(request, queues.small, Job(plan_calls.known_call)))

    @app.post("/api/plan", responses=responses, summary="Plan a training run")
    async def plan(body: plan_calls.PlanRequest, request: Request) -> Response:
        plan_calls.require_model(body)
        job = Job(plan_calls.plan_call, (body, plan_calls.MAX_CANDIDATES, plan_calls.MAX_DOTS))
        reply, costs = await queues.run(request, queues.large, job)
        if costs is not None:
            cache.add(body, costs)
        return _response(reply)

    @app.post("/api/plan/row", responses=responses, summary="The timeline of a plan's row")
    async def row(body: plan_calls.RowRequest, request: Request) -> Response:
        plan_calls.require_model(body.plan)
        num_actions, costs = plan_calls.count_row_actions(body), cache.get(body.plan)
        is_quick = costs is not None or plan_calls.has_quick_costs(body.plan)
        queue = queues.choose(num_actions) if is_quick else queues.large
        return _response(await queues.run(request, queue, Job(plan_calls.row_call, (body, costs))))

    @app.post("/api/search", responses=responses, summary="A round of a search for the best schedule of a size")
    async def search(body: plan_calls.SearchRequest, request: Request) -> Response:
        return _response(await queues.run(request, queues.large, Job(plan_calls.search_call, (body,)), urgent=False))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: ERROR_RESPONSES[status] for status in statuses}


def _response(reply: Reply) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{reply.name}"'} if reply.name else None
    return Response(reply.body, media_type=reply.media_type, headers=headers)


def _error_response(errors: Iterable[tuple[str, str]], status: int, headers: Any = None) -> Response:
    return AsciiJSONResponse({"errors": error_data(errors)}, status_code=status, headers=headers)


def _handle_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error_response(error.errors, 422)


def _handle_memory(request: Request, error: Exception) -> Response:
    message = f"{error}, which is the page's limit: use a smaller problem or the command line"
    return _error_response([("", message)], 422)


def _handle_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _error_response(describe_errors(error.errors()), 422)


def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response([("", str(error.detail))], error.status_code, error.headers)


def _handle_failure(request: Request, error: Exception) -> Response:
    """A bug: its traceback is in the server's terminal, the client gets one line."""
    text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())[:300]
    message = f"the server failed: {line}. Its terminal has the details; please report them with your request"
    return _error_response([("", message)], 500)
