"""Errors of OpenAI's endpoints, in the form that its clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from api.errors import http_error, retry_headers, unknown_route
from api.security_events import note_refusal
from api.wire.request_model import describe_problems
from contracts.errors import BudgetSpent, InvalidRequest, WeftError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNPAID = "insufficient_quota"


def error_body(error: WeftError) -> dict[str, Any]:
    """Return the body of the answer to a request that ended with ``error``."""
    if isinstance(error, BudgetSpent):
        return {"error": {"message": error.message, "type": _UNPAID, "param": None, "code": _UNPAID}}
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


class OpenAiRoute(APIRoute):
    """A route whose errors are answered in OpenAI's form, with weft's status and code."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint's handler, with its errors turned into answers."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except WeftError as error:
                note_refusal(request, error)
                return _answer(error)
            except RequestValidationError as error:
                return _answer(InvalidRequest(describe_problems(error.errors())))

        return guarded


def unknown_routes_under(prefix: str) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    """Return the handler of requests that FastAPI refuses: in OpenAI's form under ``prefix``, elsewhere in weft's."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        unknown = unknown_route(request, error) if request.url.path.startswith(f"{prefix}/") else None
        if unknown is None:
            return await http_error(request, error)
        note_refusal(request, unknown)
        return _answer(unknown)

    return answer


def _answer(error: WeftError) -> JSONResponse:
    # OpenAI's clients know no 402.
    status = 429 if isinstance(error, BudgetSpent) else error.status
    return JSONResponse(error_body(error), status_code=status, headers=retry_headers(error.retry_after))
