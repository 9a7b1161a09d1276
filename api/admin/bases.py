"""Weights of base models for operators: which ones each served name stands for, and others accepted in their place."""

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, PathId, listed, operator_body
from api.admin.services import Admin, Caller
from api.wire.request_model import PlainText, RequestModel
from contracts.errors import InvalidRequest
from store.tables import BaseWeights
from tenants.audit_actions import Action
from tenants.base_weights import accept_weights
from tenants.pages import page_of

router = APIRouter(tags=["bases"])

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class AcceptedWeights(RequestModel):
    """Weights by their fingerprint, as weft computes it of a model's folder."""

    fingerprint: PlainText


class BaseBody(BaseModel):
    """A base model's name, and the weights that it stands for."""

    base_model: str
    fingerprint: str
    accepted_at: datetime


@router.get("/bases")
async def list_bases(caller: Caller, admin: Admin, after: After = None, limit: Limit = 50) -> Listed[BaseBody]:
    """List the base models that were ever served, with the weights that each stands for."""
    del caller
    async with admin.runtime.database.read() as session:
        rows = await page_of(session, BaseWeights, after=after, most=limit + 1)
    return listed([_body(row) for row in rows], limit, [row.base_model for row in rows])


@router.put("/bases/{name:path}")
async def accept_base(
    caller: Caller,
    admin: Admin,
    request: Request,
    name: PathId,
    body: Annotated[AcceptedWeights, operator_body(AcceptedWeights)],
) -> BaseBody:
    """Have a base model's name stand for these weights from now on. Processes with others get no work of it any more.

    Raises ``InvalidRequest`` for what is no fingerprint.
    """
    if not _FINGERPRINT.fullmatch(body.fingerprint):
        raise InvalidRequest(f"fingerprint takes 64 digits of 0-9 and a-f; got {body.fingerprint[:100]!r}")
    now = await admin.now()
    async with admin.runtime.database.write() as transaction:
        await accept_weights(transaction, name, body.fingerprint, now)
        told = {"fingerprint": body.fingerprint}
        await record_operator(transaction, admin, request, caller, Action.BASE_ACCEPT, name, tenant=None, after=told)
        return _body(await transaction.get_one(BaseWeights, name, populate_existing=True))


def _body(row: BaseWeights) -> BaseBody:
    return BaseBody.model_validate(row, from_attributes=True)
