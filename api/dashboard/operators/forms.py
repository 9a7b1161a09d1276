"""Forms of operators' pages: their fields as the admin API's own bodies, with the same bounds."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request

from api.admin.services import Admin
from api.dashboard.forms import read_form
from api.wire.request_model import RequestModel, parse_json
from contracts.errors import InvalidRequest

_LONGEST_NUMBER = 19
M = TypeVar("M", bound=RequestModel)


async def get_operator_form(request: Request, admin: Admin) -> Mapping[str, str]:
    """Return the fields of the request's form. Raises as ``read_form``."""
    return await read_form(request, idle_seconds=admin.runtime.settings.body_timeout.total_seconds())


FormFields = Annotated[Mapping[str, str], Depends(get_operator_form)]


def body_of(model: type[M], **fields: Any) -> M:
    """Return the fields as a body of the admin API. Raises ``InvalidRequest`` as that does."""
    return parse_json(model, orjson.dumps(fields))


def filled(form: Mapping[str, str], name: str) -> str | None:
    """Return the field without the space around it, None for an empty one."""
    return form.get(name, "").strip() or None


def given_reason(form: Mapping[str, str]) -> str:
    """Return the form's reason. Raises ``InvalidRequest`` without one."""
    reason = filled(form, "reason")
    if reason is None:
        raise InvalidRequest(
            "nothing was changed: it needs a reason, for the audit log; fill it in and send the form again"
        )
    return reason


def integer(form: Mapping[str, str], name: str) -> int | None:
    """Return the field as a whole number, None for an empty one. Raises ``InvalidRequest``."""
    value = filled(form, name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or len(value) > _LONGEST_NUMBER:
        raise InvalidRequest(f"{name} must be a whole number; got {value[:50]!r}")
    return int(value)


def number(form: Mapping[str, str], name: str) -> float | None:
    """Return the field as a number, None for an empty one. Raises ``InvalidRequest``."""
    value = filled(form, name)
    try:
        return None if value is None else float(value)
    except ValueError:
        raise InvalidRequest(f"{name} must be a number; got {form[name][:50]!r}") from None
