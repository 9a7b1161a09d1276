"""Entries of the security log about what operators do."""

from fastapi import Request

from api.security_events import source_of
from telemetry.security import SecurityEvent, SecurityRecord, note
from tenants.operator_keys import Operator


def note_done(
    request: Request, operator: Operator, event: SecurityEvent, resource: str, *, tenant: str, detail: str | None = None
) -> None:
    """Note what the operator has done with a tenant's ``resource``."""
    # A command on the database comes from no address.
    source = None if operator.key_id is None else source_of(request)
    note(
        SecurityRecord(
            event=event,
            outcome="done",
            actor=operator.name,
            tenant=tenant,
            source=source,
            resource=resource,
            detail=detail,
        )
    )
