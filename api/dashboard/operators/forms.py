"""Forms of operators' pages."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Request

from api.admin.services import Admin
from api.dashboard.form_values import trimmed
from api.dashboard.forms import read_form
from contracts.errors import InvalidRequest


async def get_operator_form(request: Request, admin: Admin) -> Mapping[str, str]:
    """Return the fields of the request's form. Raises as ``read_form``."""
    return await read_form(request, idle_seconds=admin.runtime.settings.body_timeout.total_seconds())


FormFields = Annotated[Mapping[str, str], Depends(get_operator_form)]


def given_reason(form: Mapping[str, str]) -> str:
    """Return the form's reason. Raises ``InvalidRequest`` without one."""
    reason = trimmed(form, "reason")
    if reason is None:
        raise InvalidRequest(
            "nothing was changed: it needs a reason, for the audit log; fill it in and send the form again"
        )
    return reason
