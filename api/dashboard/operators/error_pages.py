"""Error answers of operators' pages: pages with the error's code, and the way to the login."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

from api.dashboard.error_pages import unforeseen
from api.dashboard.operators.rendering import OPS, operator_page
from api.dashboard.operators.session import drop_cookie
from api.dashboard.rendering import page
from api.errors import InternalErrorGuard
from api.security_events import note_refusal
from api.wire.request_model import describe_problems
from contracts.errors import InvalidRequest, NotFound, Unauthenticated, WeftError

LOGIN = f"{OPS}/login"
_TITLES = {400: "That did not work", 403: "Not allowed", 404: "Not here", 412: "Changed meanwhile", 429: "Too many"}


def install_operator_error_pages(app: FastAPI) -> None:
    """Render ``WeftError``, validation errors and unknown pages; ``InternalErrorGuard`` answers all other exceptions."""
    app.add_exception_handler(WeftError, _weft_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(InternalErrorGuard, answer=lambda request: _error_page(request, unforeseen()))


async def _weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    note_refusal(request, error)
    if isinstance(error, Unauthenticated):
        answer: Response = RedirectResponse(LOGIN, status_code=303)
        if request.headers.get("hx-request") == "true":
            answer = Response(status_code=401, headers={"HX-Redirect": LOGIN})
        drop_cookie(answer)
        return answer
    return _error_page(request, error)


def _error_page(request: Request, error: WeftError) -> Response:
    title = _TITLES.get(error.status, "Something went wrong")
    if request.headers.get("hx-request") == "true":
        return page(request, "error_part.html", status=error.status, title=title, error=error)
    answer = operator_page(request, None, "operators/error.html", title=title, error=error)
    answer.status_code = error.status
    return answer


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _weft_error(request, InvalidRequest(describe_problems(error.errors())))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = NotFound("there is no such page") if error.status_code in (404, 405) else InvalidRequest(str(error.detail))
    return await _weft_error(request, told)
