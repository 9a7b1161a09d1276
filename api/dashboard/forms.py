"""Forms of pages: a small body of names and values, read once the caller is known."""

from collections.abc import Mapping
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from api.route_bounds import bounds_of
from api.services import Services
from api.wire.body import read_body
from api.wire.request_model import RequestModel, describe_problems
from contracts.errors import InvalidRequest, PayloadTooLarge

M = TypeVar("M", bound=RequestModel)

_FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 100


async def read_form(request: Request, *, idle_seconds: float) -> Mapping[str, str]:
    """Return the fields of the request's form; of a field that comes twice the last.

    Raises ``InvalidRequest``, ``PayloadTooLarge``, ``BodyTooSlow``.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise InvalidRequest(f"a page takes a form, as {_FORM}")
    raw = await read_body(request, bounds_of(request.scope).body_bytes, idle_seconds=idle_seconds)
    if raw.is_cut:
        raise PayloadTooLarge("the form is too large")
    if raw.encoding != "identity":
        raise InvalidRequest("a form comes uncompressed")
    try:
        fields = dict(parse_qsl(raw.content.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise InvalidRequest("the form cannot be read") from None
    if any("\0" in text for field in fields.items() for text in field):
        raise InvalidRequest("a form holds no NUL")
    return fields


async def _form(request: Request, services: Services) -> Mapping[str, str]:
    return await read_form(request, idle_seconds=services.runtime.settings.body_timeout.total_seconds())


Form = Annotated[Mapping[str, str], Depends(_form)]
"""Parameter type of the fields of a form. Declare it after the caller."""


def parsed(model: type[M], values: Mapping[str, object]) -> M:
    """Return the values as a body of the API. Raises ``InvalidRequest`` that names the field and what to change."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(describe_problems(error.errors())) from None


def see(path: str) -> RedirectResponse:
    """Return the answer to a form that was carried out: the browser opens the page at ``path``."""
    return RedirectResponse(path, status_code=303)
