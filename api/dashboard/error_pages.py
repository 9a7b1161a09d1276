"""Error answers of the dashboard: pages with the error's code and what to do, and the way to the login."""

from collections.abc import Callable
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

from api.dashboard.cookies import drop_session_cookie
from api.dashboard.rendering import page
from api.errors import InternalErrorGuard
from api.security_events import note_refusal
from api.wire.request_model import describe_problems
from contracts.errors import EngineFailure, InvalidRequest, NotFound, Unauthenticated, WeftError

LOGIN = "/ui/login"
_CHOICES = frozenset(
    ("run", "text", "metadata", "base", "project", "state", "type", "show", "action", "days", "width", "by", "sequence")
)
"""Names of what a page's address may choose. A login's address repeats no other: it may be a secret in the wrong place."""
_TITLES = {
    400: "That did not work",
    402: "The budget is spent",
    403: "Not allowed",
    404: "Not here",
    413: "Too large",
    429: "Too many at once",
    503: "Not now",
}


Answer = Callable[[Request, WeftError], Response]
"""Makes the answer that tells an error: a page, the text of a part, or the way to the login."""


def install_error_pages(app: FastAPI, answer: Answer) -> None:
    """Answer ``WeftError``, validation errors, unknown pages and unforeseen exceptions by ``answer``, and note refusals."""

    async def tell(request: Request, error: Exception) -> Response:
        told = _as_weft_error(error)
        note_refusal(request, told)
        return answer(request, told)

    for kind in (WeftError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, tell)
    app.add_middleware(InternalErrorGuard, answer=lambda request: answer(request, _unforeseen()))


def _as_weft_error(error: Exception) -> WeftError:
    match error:
        case WeftError():
            return error
        case RequestValidationError():
            return InvalidRequest(describe_problems(error.errors()))
        case HTTPException(status_code=404 | 405):
            return NotFound("there is no such page")
        case HTTPException():
            return InvalidRequest(str(error.detail))
        case _:
            return _unforeseen()


def _unforeseen() -> EngineFailure:
    """Return what a page tells of an exception that nobody foresaw: nothing of it."""
    return EngineFailure(
        "weft itself failed here, and its log tells why. Load the page again; tell an operator if it stays."
    )


def tenant_answer(request: Request, error: WeftError) -> Response:
    """Return the answer that tells an error on a tenant's page."""
    return _to_login(request) if isinstance(error, Unauthenticated) else error_page(request, error)


def error_page(request: Request, error: WeftError) -> Response:
    """Return the page of an error. A part of a page gets its text alone."""
    title = _TITLES.get(error.status, "Something went wrong")
    template = "error_part.html" if _is_part(request) else "error.html"
    answer = page(request, template, status=error.status, title=title, error=error)
    if error.retry_after is not None:
        answer.headers["Retry-After"] = str(error.retry_after)
    return answer


def _to_login(request: Request) -> Response:
    """Return the answer that brings a browser to the login: a redirection for a page, a header for a part, else a plain 401."""
    answer: Response
    if _is_part(request):
        shown = urlsplit(request.headers.get("hx-current-url", ""))
        answer = Response(status_code=401, headers={"HX-Redirect": _login_before(shown.path, shown.query)})
    elif request.headers.get("sec-fetch-dest", "document") == "document":
        path = request.url.path if request.method == "GET" else ""
        answer = RedirectResponse(_login_before(path, request.url.query), status_code=303)
    else:
        answer = Response(status_code=401)
    drop_session_cookie(request, answer)
    return answer


def _login_before(path: str, query: str) -> str:
    """Return the login's address, from which a page of a tenant goes on to where it was, with what was chosen there."""
    if not path.startswith("/ui/"):
        return LOGIN
    choice = urlencode([(name, value) for name, value in parse_qsl(query) if name in _CHOICES])
    return f"{LOGIN}?next={quote(f'{path}?{choice}' if choice else path)}"


def _is_part(request: Request) -> bool:
    """Return whether a script of a page asks, and not a person who goes somewhere."""
    return request.headers.get("hx-request") == "true" or request.headers.get("sec-fetch-dest") == "empty"
