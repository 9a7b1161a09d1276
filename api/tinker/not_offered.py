"""Tinker endpoints that weft does not offer. Each answers a final 404 that says what to do instead."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from fastapi import APIRouter

from api.authentication import AnyKey
from contracts.errors import NotImplementedHere

router = APIRouter(tags=["not offered"])

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{segment}/{name}"
_PRIVATE = "checkpoints are private to their tenant"


@dataclass(frozen=True, slots=True)
class NotOffered:
    """An endpoint of the Tinker API, and the advice that its refusal gives."""

    method: str
    path: str
    instead: str


NOT_OFFERED = (
    NotOffered("POST", "/copy_weights", "load the checkpoint into a run and save it there"),
    NotOffered("POST", f"{_CHECKPOINT}/publish", _PRIVATE),
    NotOffered("DELETE", f"{_CHECKPOINT}/publish", _PRIVATE),
    NotOffered("GET", "/audit", "weft keeps no audit log yet"),
)


def refusal(endpoint: NotOffered) -> NotImplementedHere:
    """Return the error that ``endpoint`` answers with."""
    return NotImplementedHere(f"weft does not offer {endpoint.method} {endpoint.path}: {endpoint.instead}")


def _handler(endpoint: NotOffered) -> Callable[[AnyKey], Awaitable[NoReturn]]:
    async def refuse(_caller: AnyKey) -> NoReturn:
        raise refusal(endpoint)

    return refuse


for _endpoint in NOT_OFFERED:
    router.add_api_route(
        _endpoint.path, _handler(_endpoint), methods=[_endpoint.method], response_model=None, include_in_schema=False
    )
