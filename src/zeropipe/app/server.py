"""The page's server: static files, and five calls that answer in JSON (or in a file). It holds no state but uploads."""

from __future__ import annotations

import json
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

from zeropipe.app import models
from zeropipe.app.desk import BACKGROUND, Desk, Gone, Pulse
from zeropipe.app.downloads import MEDIA, file_of
from zeropipe.app.errors import Refusal, broken_rules
from zeropipe.app.guard import Guard
from zeropipe.app.pictures import picture
from zeropipe.app.uploads import Uploads
from zeropipe.app.work import chart, results, timelines_of
from zeropipe.schedules.registry import entries
from zeropipe.viz.colors import palette
from zeropipe.viz.payload import payload

SHADES = 2  # of a colour on the cards
REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": models.Errors, "description": "The body cannot be read."},
    413: {"model": models.Errors, "description": "The body is too large."},
    422: {"model": models.Errors, "description": "A value breaks a rule."},
}


class Plain(JSONResponse):
    """JSON in ASCII, so that no text whatsoever fails to be sent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def create_app() -> FastAPI:
    """The application, ready for any ASGI server."""
    app = FastAPI(
        title="zeropipe", version=__version__, docs_url=None, redoc_url=None, default_response_class=Plain,
        description="Simulate and compare pipeline schedules. Refusals name the field and say what to do.",
    )  # fmt: skip
    app.add_middleware(Guard)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Gone, lambda request, error: Response(status_code=499))
    _add_calls(app, Uploads(), Desk())
    static = files("zeropipe.app").joinpath("static")
    app.mount("/static", StaticFiles(directory=str(static)), name="static")
    app.mount("/viewer", StaticFiles(directory=str(files("zeropipe.viz").joinpath("viewer"))), name="viewer")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(static.joinpath("index.html")))

    return app


def _add_calls(app: FastAPI, uploads: Uploads, desk: Desk) -> None:
    @app.get("/api/schedules", response_model=models.Catalog, summary="All schedules")
    async def schedules(request: Request) -> Response:
        return Plain(await desk.work(request, _catalog))

    @app.post("/api/simulate", response_model=models.Answer, responses=REFUSED, summary="Simulate side by side")
    async def simulate(ask: models.Ask, request: Request) -> Response:
        return await desk.work(request, _answer, ask, uploads)

    @app.post("/api/chart", response_model=models.Chart, responses=REFUSED, summary="Bubble against memory")
    async def trade_off(size: models.Size, request: Request) -> Response:
        return Plain(await desk.work(request, chart, size, line=BACKGROUND))

    @app.post("/api/uploads", response_model=models.Uploaded, responses=REFUSED, summary="Read a dropped file")
    async def upload(file: models.Upload, request: Request) -> Response:
        return Plain({**_NOTHING, **await desk.work(request, _upload, uploads, file)})

    content = {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA.values()}
    content[MEDIA["json"]] = {"schema": {"type": "object"}}

    @app.post(
        "/api/files/{format}", response_class=Response, responses={200: {"content": content}, **REFUSED},
        summary="The comparison as a file",
    )  # fmt: skip
    async def download(format: models.Format, ask: models.FileAsk, request: Request) -> Response:
        name, data = await desk.work(request, file_of, ask, format, uploads)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type=MEDIA[format], headers=headers)


_NOTHING = models.Uploaded(kind="costs", name="").model_dump()


def _answer(pulse: Pulse, ask: models.Ask, uploads: Uploads) -> Plain:
    """Encoding a large answer takes as long as computing it, so that is done here, off the event loop, too."""
    shown, refused = timelines_of(ask, uploads, pulse)
    return Plain({
        "results": results(shown), "errors": _list(refused), "viewer": payload([one.timeline for one in shown]),
    })  # fmt: skip


def _upload(pulse: Pulse, uploads: Uploads, file: models.Upload) -> dict[str, Any]:
    return uploads.add(file.name, file.text)


def _catalog(pulse: Pulse) -> dict[str, Any]:
    cards = [
        {
            "name": e.name, "summary": e.summary, "placement": e.placement.__name__,
            "stages_per_rank": list(e.stages_per_rank), "splits_backward": e.splits_backward, "overlaps": e.overlaps,
            "options": dict(e.options), "limits": e.limits, "paper": e.paper, "picture": picture(e),
        }
        for e in entries()
    ]  # fmt: skip
    return {
        "version": __version__,
        "schedules": cards,
        "palette": {theme: palette(theme, SHADES) for theme in ("light", "dark")},
    }


def _list(errors: Any) -> list[dict[str, str]]:
    return [{"field": field, "message": message} for field, message in errors]


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return Plain({"errors": _list(error.errors)}, status_code=422)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Plain({"errors": _list(broken_rules(error.errors()))}, status_code=422)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Plain({"errors": _list([("", str(error.detail))])}, status_code=error.status_code, headers=error.headers)
