"""Replicas for operators: drain one, put it to sleep, and have it work again."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from api.admin.acts import record_operator
from api.admin.bodies import Listed, Reason, operator_body
from api.admin.services import Admin, Caller
from api.wire.request_model import NO_NUL, PlainText, RequestModel
from contracts.errors import UnknownBaseModel
from store.settings import name_of_base
from store.tables import ReplicaCondition
from tenants.audit_actions import Action
from tenants.base_weights import is_known_base
from tenants.replica_directives import ReplicaDirective, direct_replica, lift_directive
from tenants.worker_standings import ReplicaStanding, list_replicas

router = APIRouter(tags=["replicas"])

BaseQuery = Annotated[str, Query(pattern=NO_NUL, max_length=500)]
ReplicaName = Annotated[str, Path(pattern=NO_NUL, max_length=200)]


class ReplicaBody(BaseModel):
    """A replica, and the directive that an operator has given it; null: to work.

    - ``condition``: as its sampling process, ``process``, tells it; null for one that no process has told of.
    - ``is_alive``: false once that process is dead. ``adapters``: versions that were asked for on it since it started.
    """

    base_model: str
    replica: str
    directive: ReplicaDirective | None
    reason: str | None
    since: datetime | None
    in_flight: int
    process: str | None
    is_alive: bool
    condition: ReplicaCondition | None
    adapters: int | None


class NewDirective(RequestModel):
    """Directive for a replica of a base model, until it is lifted."""

    base_model: Annotated[PlainText, Field(min_length=1, max_length=500)]
    directive: ReplicaDirective
    reason: Reason = ""


@router.get("/replicas")
async def list_all_replicas(
    caller: Caller, admin: Admin, base_model: Annotated[str | None, Query(pattern=NO_NUL, max_length=500)] = None
) -> Listed[ReplicaBody]:
    """List the replicas of sampling processes, and those with a directive; all in one page."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.read() as session:
        found = await list_replicas(session, base_model, now)
    return Listed(items=[replica_body(one) for one in found])


@router.put("/replicas/{replica:path}")
async def direct(
    caller: Caller,
    admin: Admin,
    request: Request,
    replica: ReplicaName,
    body: Annotated[NewDirective, operator_body(NewDirective)],
) -> ReplicaBody:
    """Drain a replica (it gets no new samples, and finishes its own), or put it to sleep: then it frees its memory, too.

    Raises ``UnknownBaseModel`` for a base that no process has served and no setting names.
    """
    now, named = await admin.now(), map(name_of_base, admin.runtime.settings.base_models)
    async with admin.runtime.database.write() as transaction:
        if body.base_model not in named and not await is_known_base(transaction, body.base_model):
            raise UnknownBaseModel(
                f"no process serves a base model {body.base_model!r}; `weft process list` shows theirs"
            )
        await direct_replica(
            transaction, body.base_model, replica, body.directive, body.reason or None, admin.runtime.clock
        )
        told = {"base_model": body.base_model, "directive": body.directive, "reason": body.reason or None}
        await record_operator(
            transaction, admin, request, caller, Action.REPLICA_DIRECT, replica, tenant=None, after=told
        )
        every = await list_replicas(transaction, body.base_model, now)
    (found,) = [one for one in every if one.replica == replica]
    return replica_body(found)


@router.delete("/replicas/{replica:path}", status_code=204)
async def work(caller: Caller, admin: Admin, request: Request, replica: ReplicaName, base_model: BaseQuery) -> None:
    """Wake the replica and send it samples again. A replica that works is left alone."""
    async with admin.runtime.database.write() as transaction:
        await lift_directive(transaction, base_model, replica)
        told = {"base_model": base_model, "directive": "work"}
        await record_operator(
            transaction, admin, request, caller, Action.REPLICA_DIRECT, replica, tenant=None, after=told
        )


def replica_body(one: ReplicaStanding) -> ReplicaBody:
    """Return the body of a replica's state."""
    return ReplicaBody.model_validate(one, from_attributes=True)
