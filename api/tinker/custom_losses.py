"""Endpoint that takes a traced loss; ``forward_backward`` then runs it by its id. Nothing is stored: the id is the loss."""

from typing import Annotated, Any

from fastapi import APIRouter, Response

from api.authentication import TrainCaller
from api.json_body import json_body
from api.request_body import off_loop
from api.route_bounds import METADATA_BODY, bounded
from api.services import ApiServices, Services
from api.training_submission import promise
from api.wire.request_model import BodyPart, ListOf, MapOf, PlainText, RequestModel
from contracts.custom_loss import MAX_GRAPH_BYTES, loss_id_of, read_custom_loss
from contracts.ids import RequestId, TenantId
from tenants.sessions import live_session

router = APIRouter(tags=["training"])

_PROMISE = "custom-loss:"
"""Beginning of the request id of a loss's creation. The rest is the loss's id, so the result is in the request id."""


class CustomLossInput(BodyPart):
    """An input of the loss, and its rank: 0 to 2."""

    name: PlainText
    rank: int


class CreateCustomLossRequest(RequestModel):
    """Body of ``/create_custom_loss``: the inputs, ``logprobs`` first, and the graph, which is checked node by node."""

    session_id: PlainText
    custom_loss_seq_id: int = 0
    name: PlainText
    inputs: ListOf[CustomLossInput]
    graph: MapOf[Any]


@router.post("/create_custom_loss", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
async def create_custom_loss(
    caller: TrainCaller,
    services: Services,
    body: Annotated[CreateCustomLossRequest, json_body(CreateCustomLossRequest)],
) -> Response:
    """Check a traced loss and return the ``promise`` of its id. The same loss has the same id.

    Raises ``InvalidRequest`` naming the node that is refused, ``NotFound`` and ``SessionEnded``.
    """
    caller.check_new_work()
    async with services.runtime.database.read() as session:
        await live_session(session, caller.reach, body.session_id)
    loss_id = await off_loop(services, caller.tenant, METADATA_BODY, _loss_id, body)
    return promise(RequestId(_PROMISE + loss_id))


def _loss_id(body: CreateCustomLossRequest) -> str:
    inputs = [{"name": given.name, "rank": given.rank} for given in body.inputs]
    return loss_id_of(body.name, inputs, body.graph)


async def created_loss(services: ApiServices, caller: TenantId, request_id: str) -> dict[str, object] | None:
    """Return the result of a loss's creation by its request id; None for another request's id. Raises ``InvalidRequest``."""
    if not request_id.startswith(_PROMISE):
        return None
    loss_id = request_id.removeprefix(_PROMISE)
    await off_loop(services, caller, MAX_GRAPH_BYTES, read_custom_loss, loss_id)
    return {"type": "create_custom_loss", "loss_id": loss_id}
