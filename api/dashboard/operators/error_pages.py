"""Error answers of operators' pages: pages with the error's code, and the way to the login."""

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from api.dashboard.operators.rendering import OPS, operator_page
from api.dashboard.operators.session import drop_cookie
from api.dashboard.rendering import page
from contracts.errors import Unauthenticated, WeftError

LOGIN = f"{OPS}/login"
_TITLES = {400: "That did not work", 403: "Not allowed", 404: "Not here", 412: "Changed meanwhile", 429: "Too many"}


def operator_answer(request: Request, error: WeftError) -> Response:
    """Return the answer that tells an error on an operators' page."""
    is_part = request.headers.get("hx-request") == "true"
    if isinstance(error, Unauthenticated):
        return _to_login(is_part=is_part)
    title = _TITLES.get(error.status, "Something went wrong")
    if is_part:
        return page(request, "error_part.html", status=error.status, title=title, error=error)
    answer = operator_page(request, None, "operators/error.html", title=title, error=error)
    answer.status_code = error.status
    return answer


def _to_login(*, is_part: bool) -> Response:
    answer: Response = RedirectResponse(LOGIN, status_code=303)
    if is_part:
        answer = Response(status_code=401, headers={"HX-Redirect": LOGIN})
    drop_cookie(answer)
    return answer
