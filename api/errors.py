"""Bodies of error answers: ``{"detail", "code", "retryable"}`` with the status of the error's class, never a traceback."""

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.security_events import note_refusal
from api.wire.request_model import describe_problems
from contracts.errors import InvalidRequest, NotImplementedHere, PollAgain, Unauthenticated, WeftError

_log = logging.getLogger(__name__)

_NOTHING_THERE = (404, 405)
_ADMIN = "/admin/"


def error_response(
    status: int, *, detail: str, code: str, retryable: bool, retry_after: int | None = None
) -> JSONResponse:
    """Return an error answer in the form that every route except OpenAI's has. ``retry_after`` is in seconds."""
    content = {"detail": detail, "code": code, "retryable": retryable}
    return JSONResponse(content, status_code=status, headers=retry_headers(retry_after))


def retry_headers(retry_after: int | None) -> dict[str, str]:
    """Return the header that says in how many seconds to send the request again, if it is known."""
    return {} if retry_after is None else {"Retry-After": str(retry_after)}


def install_error_handlers(app: FastAPI) -> None:
    """Render ``WeftError``, validation errors and unknown routes; ``InternalErrorGuard`` answers all other exceptions."""
    app.add_exception_handler(WeftError, _weft_error)
    app.add_exception_handler(PollAgain, _poll_again)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(InternalErrorGuard)


def internal_error(_request: Request) -> Response:
    """Return the answer to a request that ended by an unforeseen exception."""
    return error_response(
        500,
        detail="internal error; send the request again, and report its x-trace-id if that fails too",
        code="internal_error",
        retryable=True,
    )


class InternalErrorGuard:
    """ASGI middleware that logs an unforeseen exception with its traceback and answers a bare 500."""

    def __init__(self, app: ASGIApp, answer: Callable[[Request], Response] = internal_error) -> None:
        """``answer`` makes the answer in the form of the application's others."""
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; answer in its place if it raises before its answer began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            _log.debug("client left during %s %s", scope["method"], scope["path"])
        except Exception:
            _log.exception("unforeseen error in %s %s", scope["method"], scope["path"])
            if started:
                raise
            response = self._answer(Request(scope))
            await response(scope, receive, send)


async def _weft_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WeftError)
    note_refusal(request, error)
    answer = error_response(
        error.status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        retry_after=error.retry_after,
    )
    if isinstance(error, Unauthenticated):
        # RFC 6750: the SDK exchanges its key for a new token.
        answer.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return answer


async def _poll_again(_request: Request, error: Exception) -> JSONResponse:
    """Answer as a poll whose time is over, with the reason where the SDK looks for it."""
    assert isinstance(error, PollAgain)
    content = {
        "type": "try_again",
        "queue_state": "paused_rate_limit",
        "queue_state_reason": error.message,
        "detail": error.message,
        "code": error.code,
        "retryable": error.retryable,
    }
    return JSONResponse(content, status_code=error.status)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _weft_error(request, InvalidRequest(describe_problems(error.errors())))


def unknown_route(request: Request, error: HTTPException) -> NotImplementedHere | None:
    """Return the error of a request that no route answers, None if ``error`` is another one."""
    if error.status_code not in _NOTHING_THERE:
        return None
    path = request.url.path
    if path.startswith(_ADMIN) and getattr(request.app.state, "is_tenants", False):
        return NotImplementedHere("this is the tenants' port; the admin API listens on WEFT_ADMIN_PORT")
    route = f"{request.method} {path[:200]}"
    return NotImplementedHere(f"weft offers no {route}; its documentation's page of routes lists what there is")


async def http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that FastAPI itself refused."""
    assert isinstance(error, HTTPException)
    if (unknown := unknown_route(request, error)) is not None:
        return await _weft_error(request, unknown)
    code = InvalidRequest.code if error.status_code < 500 else "internal_error"
    return error_response(error.status_code, detail=str(error.detail), code=code, retryable=error.status_code >= 500)
