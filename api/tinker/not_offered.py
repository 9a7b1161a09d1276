"""Tinker endpoints that weft knows and does not offer: a final 404 that says what to do instead."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from api.json_body import PlainText, RequestModel, parse_json
from api.services import Caller, Services
from api.wire.body import read_body
from engine.contracts.errors import NotImplementedHere
from engine.contracts.operations import OperationKind
from tenants.runs import check_usable, get_run
from workers.ledger.operations import RejectedOperation

router = APIRouter(tags=["not offered"])

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{segment}/{name}"
_PRIVATE = "checkpoints are private to their tenant"
_FILES = "read the checkpoint's PEFT files from the service's data folder"
_POLL = "poll retrieve_future for each request"


@dataclass(frozen=True, slots=True)
class NotOffered:
    """An endpoint of the Tinker API and what stands in for it here."""

    method: str
    path: str
    instead: str


NOT_OFFERED = (
    NotOffered("POST", "/auth/token", "send the API key itself in X-API-Key"),
    NotOffered("POST", "/retrieve_futures", _POLL),
    NotOffered("POST", "/cancel_future", "let the request finish; its result may be left unread"),
    NotOffered("POST", "/join_sampling_session", "cloned samplers pick their seq_ids by themselves"),
    NotOffered("POST", "/create_custom_loss", "forward_backward_custom computes the loss in the client"),
    NotOffered("POST", "/copy_weights", "load the checkpoint into a run and save it there"),
    NotOffered("POST", f"{_CHECKPOINT}/publish", _PRIVATE),
    NotOffered("DELETE", f"{_CHECKPOINT}/publish", _PRIVATE),
    NotOffered("GET", f"{_CHECKPOINT}/external_weights_urls", _FILES),
    NotOffered("GET", f"{_CHECKPOINT}/archive", _FILES),
    NotOffered("POST", "/sessions/search", "list sessions with GET /sessions"),
    NotOffered("PUT", "/sessions/{session_id}/project", "weft has no projects"),
    NotOffered("GET", "/sessions/{session_id}/trace_export", "weft keeps no traces of sessions"),
    NotOffered("GET", "/audit", "weft keeps no audit log yet"),
    NotOffered("GET", "/billing/usage/events", "weft bills nothing"),
    NotOffered("GET", "/billing/usage/checkpoints/current", "GET /checkpoints gives the size of each"),
)


def refusal(endpoint: NotOffered) -> NotImplementedHere:
    """The error that ``endpoint`` answers with."""
    return NotImplementedHere(f"weft does not offer {endpoint.method} {endpoint.path}: {endpoint.instead}")


def _handler(endpoint: NotOffered) -> Callable[[Caller], Awaitable[NoReturn]]:
    async def refuse(_caller: Caller) -> NoReturn:
        raise refusal(endpoint)

    return refuse


for _endpoint in NOT_OFFERED:
    router.add_api_route(
        _endpoint.path, _handler(_endpoint), methods=[_endpoint.method], response_model=None, include_in_schema=False
    )


class ExternalSaveRequest(RequestModel):
    """The part of ``save_weights_external`` that says whose turn it takes."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: PlainText
    seq_id: int = Field(ge=1, le=2**31 - 1)


class Promise(BaseModel):
    """A future to ask for."""

    model_config = ConfigDict(protected_namespaces=())

    request_id: str
    model_id: str


@router.post("/save_weights_external", include_in_schema=False)
async def save_weights_external(caller: Caller, services: Services, request: Request) -> Promise:
    """A promise that has failed already: the call has taken a ``seq_id``, and a bare 404 would leave a hole in the run.

    Raises ``NotFound``, ``RunUnloaded``, ``SequenceConflict``, ``InvalidRequest``.
    """
    raw = await read_body(request, services.settings.max_body_bytes)
    body = parse_json(ExternalSaveRequest, raw)
    digest = blake2b(raw, digest_size=16).digest()
    async with services.database.write() as transaction:
        run = await get_run(transaction, caller, body.model_id)
        request_id = await services.ledger.find(transaction, lane=run.id, seq_id=body.seq_id, digest=digest)
        if request_id is None:
            check_usable(run)
            rejected = RejectedOperation(
                tenant=caller,
                lane=run.id,
                seq_id=body.seq_id,
                kind=OperationKind.SAVE_WEIGHTS,
                base_model=run.base_model,
                digest=digest,
                error=refusal(NotOffered("POST", "/save_weights_external", f"use save_weights, then {_FILES}")),
            )
            request_id = await services.ledger.reject(transaction, rejected)
    return Promise(request_id=request_id, model_id=run.id)
