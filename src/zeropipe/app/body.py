"""JSON bodies, parsed within the limits for files: no text makes the server slow or fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from zeropipe.core.formats.parse import parse_json


class BoundedRequest(Request):
    """A request whose `json()` raises JSONDecodeError for every body that cannot be read."""

    async def json(self) -> Any:
        try:
            return parse_json((await self.body()).decode())
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # not UTF-8, a number too long, lists too deep
            reason = "the body is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise json.JSONDecodeError(reason, "", 0) from None


class BoundedRoute(APIRoute):
    """A route that reads BoundedRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handle(BoundedRequest(request.scope, request.receive))

        return handle_bounded
