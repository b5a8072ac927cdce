"""The page's server: static files, and calls that answer in JSON (or in a file). It holds no state but uploads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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

from zeropipe.app import models, planning
from zeropipe.app.body import Route
from zeropipe.app.calls import Reply, catalog_call, chart_call, encoded, file_call, listed, simulate_call, upload_call
from zeropipe.app.downloads import MEDIA, require_form
from zeropipe.app.errors import Refusal, broken_rules
from zeropipe.app.guard import Guard
from zeropipe.app.job_queue import Job
from zeropipe.app.queues import MAX_SMALL, Disconnected, Queues
from zeropipe.app.uploads import Uploads
from zeropipe.app.work import chart_plans, effort_of, plans_of
from zeropipe.core.limits import PAGE
from zeropipe.core.workers import WorkerError, WorkerMemoryError

TEXT = 4  # bytes of a file that are about one action
DRAWN_APART = ("png", "pdf")  # by matplotlib, which takes long to import
REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": models.Errors, "description": "The body cannot be read."},
    403: {"model": models.Errors, "description": "The request comes from another page, or names another host."},
    413: {"model": models.Errors, "description": "The body is too large."},
    422: {"model": models.Errors, "description": "A value breaks a rule."},
    503: {"model": models.Errors, "description": "Too many requests wait; Retry-After says when to come again."},
}


class Plain(JSONResponse):
    """JSON in ASCII."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def create_app(*, hosts: Sequence[str] = (), schedules: Sequence[str] = (), warm: bool = False) -> FastAPI:
    """The application, ready for any ASGI server.

    It answers under this machine's addresses and `localhost`, and under the names in `hosts`. `schedules` are those of
    the user's files, path/to/mine.py:name. With `warm`, a worker process starts with the server.
    """
    queues = Queues(schedules)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            queues.start()
        yield
        queues.close()

    app = FastAPI(
        title="zeropipe", version=__version__, docs_url=None, redoc_url=None, default_response_class=Plain,
        description="Simulate and compare pipeline schedules. Refusals name the field and say what to do.",
        lifespan=life,
    )  # fmt: skip
    app.router.route_class = Route
    app.state.queues = queues
    app.add_middleware(Guard, hosts=hosts)
    for kind, handler in (
        (Refusal, _refused), (WorkerMemoryError, _out_of_memory), (RequestValidationError, _invalid),
        (HTTPException, _http), (Exception, _failed),
    ):  # fmt: skip
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Disconnected, lambda request, error: Response(status_code=499))
    _add_calls(app, Uploads(), queues)
    _add_plans(app, queues)
    static = files("zeropipe.app").joinpath("static")
    app.mount("/static", StaticFiles(directory=str(static)), name="static")
    app.mount("/viewer", StaticFiles(directory=str(files("zeropipe.viz").joinpath("viewer"))), name="viewer")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(static.joinpath("index.html")))

    @app.get("/plan", include_in_schema=False)
    async def plan_page() -> FileResponse:
        return FileResponse(str(static.joinpath("plan.html")))

    return app


def _add_calls(app: FastAPI, uploads: Uploads, queues: Queues) -> None:
    @app.get("/api/schedules", response_model=models.Catalog, responses=_some(403, 503), summary="All schedules")
    async def schedules(request: Request) -> Response:
        return _response(await queues.run(request, queues.small, Job(catalog_call, ())))

    @app.get("/api/load", response_model=dict[str, models.Load], responses=_some(403), summary="How busy the server is")
    async def load() -> Response:
        return Plain({name: load._asdict() for name, load in queues.load.items()})

    @app.post("/api/simulate", response_model=models.Answer, responses=REFUSED, summary="Simulate side by side")
    async def simulate(ask: models.Ask, request: Request) -> Response:
        here = uploads.some(choice.file for choice in ask.schedules)
        plans = plans_of(ask, here)
        queue = queues.choose(effort_of(plans), [plan.entry for plan in plans if plan.entry])
        return _response(await queues.run(request, queue, Job(simulate_call, (ask, here))))

    @app.post("/api/chart", response_model=models.Chart, responses=REFUSED, summary="Bubble against memory")
    async def trade_off(size: models.Size, request: Request) -> Response:
        plans = chart_plans(size)
        queue = queues.choose(effort_of(plans), [plan.entry for plan in plans if plan.entry])
        return _response(await queues.run(request, queue, Job(chart_call, (size,)), urgent=False))

    text = {"text/plain": {"schema": {"type": "string", "maxLength": PAGE.file_bytes, "examples": ["0F0,0B0\n"]}}}

    @app.post(
        "/api/uploads", response_model=models.Uploaded, responses=REFUSED, summary="Read a dropped file",
        description="The body is the file: a schedule (.csv, .json), a timeline (.json) or costs (.toml, .json).",
        openapi_extra={"requestBody": {"required": True, "content": text}},
    )  # fmt: skip
    async def upload(name: models.FileName, request: Request) -> Response:
        data = await request.body()
        queue = queues.choose(len(data) // TEXT + 1)
        reply, key, found = await queues.run(request, queue, Job(upload_call, (name, data)))
        if found is not None:
            uploads.keep(key, found)
        return _response(reply)

    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA.values()}
    content[MEDIA["json"]] = {"schema": {"type": "object"}}

    @app.post(
        "/api/files/{format}", response_class=Response, responses={200: {"content": content}, **REFUSED},
        summary="The comparison as a file",
    )  # fmt: skip
    async def download(format: models.Format, ask: models.FileAsk, request: Request) -> Response:
        here = uploads.some(choice.file for choice in ask.schedules)
        plans = plans_of(ask, here)
        require_form(format, plans)
        effort = effort_of(plans) + (MAX_SMALL if format in DRAWN_APART else 0)
        queue = queues.choose(effort, [plan.entry for plan in plans if plan.entry])
        return _response(await queues.run(request, queue, Job(file_call, (ask, format, here))))


def _add_plans(app: FastAPI, queues: Queues) -> None:
    """Calls that take seconds: always in a worker process, which stops when the browser no longer waits."""
    answer = {200: {"model": dict[str, Any]}, **REFUSED}
    kept = planning.Kept()

    @app.get("/api/known", responses={200: answer[200], **_some(403, 503)}, summary="Models and GPUs for plans")
    async def known(request: Request) -> Response:
        return _response(await queues.run(request, queues.small, Job(planning.known_call, ())))

    @app.post("/api/plan", responses=answer, summary="What to run, from estimates")
    async def plan(ask: planning.PlanAsk, request: Request) -> Response:
        planning.require_model(ask)
        job = Job(planning.plan_call, (ask, planning.MOST, planning.DOTS))
        reply, costs = await queues.run(request, queues.large, job)
        if costs is not None:
            kept.keep(ask, costs)
        return _response(reply)

    @app.post("/api/plan/row", responses=answer, summary="The timeline of a plan's row")
    async def row(ask: planning.RowAsk, request: Request) -> Response:
        planning.require_model(ask.plan)
        effort, costs = planning.row_actions(ask), kept.get(ask.plan)
        queue = queues.choose(effort) if planning.is_quick(ask.plan) or costs is not None else queues.large
        return _response(await queues.run(request, queue, Job(planning.row_call, (ask, costs))))

    @app.post("/api/search", responses=answer, summary="A round of a search for the best schedule of a size")
    async def search(ask: planning.SearchAsk, request: Request) -> Response:
        return _response(await queues.run(request, queues.large, Job(planning.search_call, (ask,)), urgent=False))


def _some(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: REFUSED[status] for status in statuses}


def _response(reply: Reply) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{reply.name}"'} if reply.name else None
    return Response(reply.body, media_type=reply.media, headers=headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return Plain({"errors": listed(error.errors)}, status_code=422)


def _out_of_memory(request: Request, error: Exception) -> Response:
    message = f"{error}, which is the page's limit: use a smaller problem or the command line"
    return Plain({"errors": listed([("", message)])}, status_code=422)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Plain({"errors": listed(broken_rules(error.errors()))}, status_code=422)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Plain({"errors": listed([("", str(error.detail))])}, status_code=error.status_code, headers=error.headers)


def _failed(request: Request, error: Exception) -> Response:
    """A mistake of ours: its traceback goes to the terminal, one line to the client."""
    what = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
    line = " ".join(what.split())[:300]
    message = f"the server failed: {line}. Its terminal says more; please report it with what you asked for"
    return Plain({"errors": listed([("", message)])}, status_code=500)
