"""Submission of a sample request to the ledger. Every sample takes this path, whichever wire it came by."""

from dataclasses import dataclass, replace

from fastapi import Request

from api.rate_headers import note_rate, note_stored_rate
from api.request_body import off_loop
from api.services import ApiServices
from api.shared_reads import Purpose, note_shared_read, shared_read
from api.wire.sampling_codec import sample_request
from api.wire.tinker_requests import AsampleRequest
from api.wire.trajectory import trajectory_of
from contracts.codec import request_digest
from contracts.errors import BudgetSpent, InvalidRequest, OverRate, WeftError
from contracts.ids import RequestId, SamplerId, TenantId
from contracts.ledger_records import NewOperation, new_request_id
from contracts.operations import OperationKind, SampleRequest
from contracts.rate_lines import RateLine
from contracts.sample_demand import demand_of
from ledger.payload_files import PayloadFiles
from ledger.token_feed import FeedKey
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

    - ``body``: the request as the client sent it, the same in a repeat.
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
    body: bytes
    obstacle: WeftError | None = None
    may_return: bool = True
    may_wait: bool = True
    lines: tuple[RateLine, ...] = ()
    read: Repeated | None = None

    @property
    def key(self) -> FeedKey:
        """Key under which the sample's tokens are followed."""
        return self.sampler, self.seq_id

    @property
    def digest(self) -> bytes:
        """Digest that tells a repeat of the request from a conflict."""
        return request_digest(OperationKind.SAMPLE, self.body)

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
    sample = await off_loop(services, caller.tenant, len(body.sent), sample_request, body, facts, settings)
    sample = replace(sample, trajectory=trajectory_of(request, body.trajectory))
    return SampleSubmission(
        caller.tenant,
        sampler.id,
        body.seq_id,
        sampler.base_model,
        sample,
        body.sent,
        obstacle=sampler.obstacle or caller.obstacle_of_work(sampler.base_model) or unpaid(services, caller, sampler),
        lines=lines_of(caller, Meter.SAMPLE, sampler.project, sampler.project_limits),
        read=None if of is None else shared_read(caller, of[0], of[1], Purpose.SAMPLE),
    )


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
    payloads = services.runtime.ledger.payloads
    if submission.obstacle is None:
        operation = await submission.operation(payloads, services.sampled_base(submission.base_model).context_length)
        request_id = await payloads.recorded(operation, _accepted(services, operation))
        if request_id == operation.id:
            note_shared_read(services, submission.read)
        return request_id
    async with services.runtime.database.read() as session:
        earlier = await services.runtime.ledger.find(
            session, lane=submission.sampler, seq_id=submission.seq_id, digest=submission.digest
        )
    if earlier is None:
        raise submission.obstacle
    return earlier


async def _accepted(services: ApiServices, operation: NewOperation) -> RequestId:
    try:
        accepted = await services.sample_intake.accept_rated(operation)
    except OverRate:
        await note_stored_rate(services.runtime.database, operation, Meter.SAMPLE, services.runtime.clock())
        raise
    note_rate(Meter.SAMPLE, accepted.rate, services.runtime.clock())
    return accepted.id
