"""``retrieve_futures``: one poll for all samples of a sampling client, held open until some have ended."""

from time import monotonic
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.authentication import AnyKey
from api.json_body import json_body
from api.route_bounds import METADATA_BODY, Holding, bounded
from api.services import ApiServices, Services
from api.waiting_polls import SEQ_IDS_OF_A_COPY, SamplerLane
from api.wire.json_counts import DATA
from api.wire.request_model import BodyPart, ListOf, PlainText, RequestModel
from api.wire.tinker_requests import SampleSeqId
from contracts.ids import SamplerId, TenantId
from ledger.told_ends import ToldEnd, first_pending_sample
from store.repeat import wait_for

router = APIRouter(tags=["futures"])

_MOST_PAGES = 4
"""Most pages of ends that one poll passes over. The client's next poll goes on from the cursor."""


class PollTarget(BodyPart):
    """A copy of a sampler's client; the client itself is copy 0."""

    sampling_session_id: PlainText
    cloned_sampler_id: SampleSeqId = 0


class RetrieveManyRequest(RequestModel):
    """Samples of ``target`` that ended after ``prev_cursor``. ``timeout``: seconds to wait for one; 0 does not wait.

    ``retrieved_request_ids``: samples whose results the client has. They are kept for their grace time all the same.
    """

    target: PollTarget
    prev_cursor: Annotated[int, Field(ge=0, le=2**62)] = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: ListOf[PlainText] = []


class Completion(BaseModel):
    """A sample that has ended, with the size of its result in bytes if it has one."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class Completions(BaseModel):
    """Samples that have ended. ``cursor`` is the next poll's ``prev_cursor``.

    ``queue_state`` and ``queue_state_reason``, where none has ended: why the first that waits does, as a single poll tells it.
    """

    completions: list[Completion]
    cursor: int
    queue_state: str | None = None
    queue_state_reason: str | None = None


@router.post("/retrieve_futures")
@bounded(body=METADATA_BODY, holding=Holding.POLL, is_counted=False)
async def retrieve_futures(
    caller: AnyKey, services: Services, body: Annotated[RetrieveManyRequest, json_body(RetrieveManyRequest, DATA)]
) -> Completions:
    """Return the samples of a sampling client that ended since its last poll, after waiting for at most ``poll_hold``.

    Each is told once to a client that sends the cursor on. The answer to a poll that passes over many ends of other copies is
    empty, and has a higher cursor. Raises ``NotFound``.
    """
    sampler = await services.batched_reads.samplers.standing(caller.reach, body.target.sampling_session_id)
    hold = services.runtime.settings.poll_hold.total_seconds()
    seconds = hold if body.timeout is None else min(hold, body.timeout)
    ends_at, cursor, copy = monotonic() + seconds, body.prev_cursor, body.target.cloned_sampler_id
    with services.waiting_polls.of(caller.tenant, sampler.id) as lane:
        while True:
            told, cursor, is_whole = await _told_after(lane, cursor, copy)
            left = ends_at - monotonic()
            if told or not is_whole or services.runtime.wakeups.is_closed:
                return Completions(completions=[_completion(end) for end in told], cursor=cursor)
            if left <= 0:
                return await _still_waiting(services, caller.tenant, sampler.id, cursor, copy)
            with lane.ends_of(copy, cursor) as event:
                await wait_for(event, left)


async def _still_waiting(
    services: ApiServices, caller: TenantId, sampler: SamplerId, cursor: int, copy: int
) -> Completions:
    """Return an answer without ends, with the reason of the copy's first pending sample."""
    first, last = copy * SEQ_IDS_OF_A_COPY, (copy + 1) * SEQ_IDS_OF_A_COPY
    async with services.runtime.database.read() as session:
        waiting = await first_pending_sample(session, caller, sampler, first=first, before=last)
    wait = None if waiting is None else await services.waits.of(waiting)
    if wait is None:
        state = None if waiting is None else "active"
        return Completions(completions=[], cursor=cursor, queue_state=state)
    return Completions(completions=[], cursor=cursor, queue_state=wait.queue_state, queue_state_reason=wait.text)


async def _told_after(lane: SamplerLane, cursor: int, copy: int) -> tuple[list[ToldEnd], int, bool]:
    """Return the next ends of one copy's samples, the cursor after them, and whether all ends up to now were looked at.

    Ends of other copies are passed over, at most ``_MOST_PAGES`` of them.
    """
    for _ in range(_MOST_PAGES):
        ends = await lane.ends_after(cursor)
        if not ends:
            return [], cursor, True
        cursor = ends[-1].number
        told = [end for end in ends if end.seq_id // SEQ_IDS_OF_A_COPY == copy]
        if told:
            return told, cursor, True
    return [], cursor, False


def _completion(end: ToldEnd) -> Completion:
    if not end.is_done:
        return Completion(state="failed", request_id=end.id)
    return Completion(state="finished", request_id=end.id, response_payload_uncompressed_size=end.result_bytes)
