"""Submission of a sample request to the ledger. Every sample takes this path, whichever wire it came by."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from api.rate_headers import note_rate, note_stored_rate
from api.request_body import off_loop
from api.services import ApiServices
from api.shared_reads import Purpose, note_shared_read, shared_read
from api.wire.sampling_codec import sample_request
from api.wire.tinker_requests import AsampleRequest
from api.wire.trajectory import trajectory_of
from contracts.base_model import BaseModelFacts
from contracts.codec import request_digest
from contracts.errors import BudgetSpent, InvalidRequest, OverRate, WeftError
from contracts.ids import RequestId, SamplerId, TenantId
from contracts.ledger_records import NewOperation, new_request_id
from contracts.operations import OperationKind, SampleRequest
from contracts.rate_lines import RateLine
from contracts.sample_demand import demand_of
from ledger.payload_files import PayloadFiles
from ledger.token_feed import FeedKey
from store.settings import Settings
from telemetry.context import current_work
from tenants.audit_tally import Repeated
from tenants.budgets import refusal
from tenants.rate_lines import lines_of
from tenants.rates import Meter
from tenants.reach import default_project
from tenants.rights import Principal
from tenants.samplers import SamplerStanding


@dataclass(frozen=True, slots=True)
class SampleSubmission:
    """A sample of ``tenant`` from ``sampler``.

    - ``digest``: digest of the body as the client sent it, which tells a repeat of the request from a conflict.
    - ``obstacle``: the reason why no new work is taken, if any.
    - ``may_wait``: False for a client that cannot be told that its sample waits for a rate.
    - ``lines``: rates of its key and its project.
    - ``read``: use of another tenant's checkpoint, as that tenant's log counts it.
    - ``may_return``: a client that has lost the connection can find the sample again by repeating its request.
    """

    tenant: TenantId
    sampler: SamplerId
    seq_id: int
    base_model: str
    sample: SampleRequest
    digest: bytes
    obstacle: WeftError | None = None
    may_return: bool = True
    may_wait: bool = True
    lines: tuple[RateLine, ...] = ()
    read: Repeated | None = None

    @property
    def key(self) -> FeedKey:
        """Key under which the sample's tokens are followed."""
        return self.sampler, self.seq_id

    async def operation(self, payloads: PayloadFiles, context_length: int) -> NewOperation:
        """Store the payload and return the operation to record. A repeat has the same lane, ``seq_id`` and digest."""
        request_id = new_request_id()
        return NewOperation(
            id=request_id,
            tenant=self.tenant,
            lane=self.sampler,
            seq_id=self.seq_id,
            kind=OperationKind.SAMPLE,
            base_model=self.base_model,
            payload=await payloads.store(self.tenant, request_id, self.sample),
            digest=self.digest,
            tokens=len(self.sample.prompt),
            demand=demand_of(self.sample, context_length),
            trace_id=current_work().trace_id,
            key_id=current_work().key_id,
            may_wait=self.may_wait,
            lines=self.lines,
        )


async def tinker_submission(
    services: ApiServices, caller: Principal, request: Request, body: AsampleRequest
) -> SampleSubmission:
    """Return the submission that a Tinker request asks for. Raises ``NotFound``, ``InvalidRequest``."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequest(
            "sampling_session_id and seq_id are needed; open a sampling session with create_sampling_session"
        )
    sampler = await services.batched_reads.samplers.standing(caller.reach, body.sampling_session_id)
    facts, settings, of = services.sampled_base(sampler.base_model), services.runtime.settings, sampler.shared_by
    sample, digest = await off_loop(services, caller.tenant, len(body.sent), _read, body, facts, settings)
    sample = replace(sample, trajectory=trajectory_of(request, body.trajectory))
    return SampleSubmission(
        caller.tenant,
        sampler.id,
        body.seq_id,
        sampler.base_model,
        sample,
        digest,
        obstacle=sampler.obstacle or caller.obstacle_of_work(sampler.base_model) or unpaid(services, caller, sampler),
        lines=lines_of(caller, Meter.SAMPLE, sampler.project, sampler.project_limits),
        read=None if of is None else shared_read(caller, of[0], of[1], Purpose.SAMPLE),
    )


def _read(body: AsampleRequest, facts: BaseModelFacts, settings: Settings) -> tuple[SampleRequest, bytes]:
    """Return the body's sample and its digest. Raises ``InvalidRequest``."""
    return sample_request(body, facts, settings), request_digest(OperationKind.SAMPLE, body.sent)


def unpaid(services: ApiServices, caller: Principal, sampler: SamplerStanding) -> BudgetSpent | None:
    """Return the error of new samples of a caller whose budget is spent. For a client that cannot pause, they wait instead."""
    if not caller.pauses_unpaid:
        return None
    project = sampler.project or default_project(caller.tenant)
    return refusal(sampler.spent_budgets, caller.payer, project, services.runtime.clock())


async def accept_sample(services: ApiServices, submission: SampleSubmission) -> RequestId:
    """Record the sample and return its request id; a repeat returns the id of the first one.

    Raises the submission's ``obstacle`` for a sample that is no repeat, ``SequenceConflict``, ``InvalidRequest`` for a sample
    beyond its tenant's limits, and ``TooManySamples`` (the SDK waits and sends it again) when the tenant has too many pending.
    """
    return (await accept_samples(services, [submission]))[0]


async def accept_samples(services: ApiServices, submissions: Sequence[SampleSubmission]) -> list[RequestId]:
    """Record the samples of one request, all from one sampler, as ``accept_sample`` records one; on an error, none of them."""
    return await (await prepared_samples(services, submissions))


async def prepared_samples(
    services: ApiServices, submissions: Sequence[SampleSubmission]
) -> Coroutine[Any, Any, list[RequestId]]:
    """Pack the samples, and return the rest of ``accept_samples``: what only waits, and may be a task of its own."""
    obstacle = next((one.obstacle for one in submissions if one.obstacle is not None), None)
    if obstacle is not None:
        return _all_earlier(services, submissions, obstacle)
    payloads, operations = services.runtime.ledger.payloads, []
    for one in submissions:
        operations.append(await one.operation(payloads, services.sampled_base(one.base_model).context_length))
        # Many samples are packed: others' requests get their turn between two of them.
        await asyncio.sleep(0)
    return _recorded(services, submissions, operations)


async def _recorded(
    services: ApiServices, submissions: Sequence[SampleSubmission], operations: Sequence[NewOperation]
) -> list[RequestId]:
    """Record the operations. Return their ids, or of repeats the ids of the first ones."""
    accepted = await services.runtime.ledger.payloads.all_recorded(operations, _accepted(services, operations))
    for submission, operation, request_id in zip(submissions, operations, accepted, strict=True):
        if request_id == operation.id:
            note_shared_read(services, submission.read)
    return list(accepted)


async def _all_earlier(
    services: ApiServices, submissions: Sequence[SampleSubmission], obstacle: WeftError
) -> list[RequestId]:
    return [await _earlier(services, one, obstacle) for one in submissions]


async def _earlier(services: ApiServices, submission: SampleSubmission, obstacle: WeftError) -> RequestId:
    """Return the id of the sample that the submission repeats. Raises ``obstacle`` without one."""
    async with services.runtime.database.read() as session:
        earlier = await services.runtime.ledger.find(
            session, lane=submission.sampler, seq_id=submission.seq_id, digest=submission.digest
        )
    if earlier is None:
        raise obstacle
    return earlier


async def _accepted(services: ApiServices, operations: Sequence[NewOperation]) -> list[RequestId]:
    try:
        accepted = await services.sample_intake.accept_together(operations)
    except OverRate:
        await note_stored_rate(services.runtime.database, operations[0], Meter.SAMPLE, services.runtime.clock())
        raise
    note_rate(
        Meter.SAMPLE, next((one.rate for one in accepted if one.rate is not None), None), services.runtime.clock()
    )
    return [one.id for one in accepted]
