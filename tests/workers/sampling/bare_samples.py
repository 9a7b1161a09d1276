"""Samples of the bare base over a real database, and a whole sampling process to draw them: worker, pool, torch replica."""

from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
from sqlalchemy import select

from contracts.ids import RequestId, SamplerId, TenantId
from contracts.ledger_records import NewOperation, OperationState, new_request_id
from contracts.operations import OperationKind, SampleOutput, SampleRequest, SamplingParams
from engine.model.base import BaseModel
from engine.sampling.trainer_forward import TrainerForward
from engine.sampling.vocabulary import read_vocabulary
from ledger.runtime import Runtime
from store.clock import utc_now
from store.tables import Operation
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from tests.payloads import digest, stored
from workers.sampling.sampler_wiring import BaseSampling, wire_sampling
from workers.torch_source import TorchSource

BASE = "weft/tiny"
SECONDS = 90.0


@dataclass
class Drawer:
    """A tenant with a sampler of the bare base."""

    runtime: Runtime
    tenant: TenantId
    sampler: SamplerId
    sent: list[RequestId] = field(default_factory=list)

    async def send(self, first_token: int, *, tokens: int = 8, as_stored: bool = False) -> RequestId:
        """Have a sample accepted, whose prompt begins with ``first_token``; with ``as_stored``, stored as requests' are."""
        request = SampleRequest(np.array([first_token, 2, 3]), 1, SamplingParams(max_tokens=tokens, seed=1))
        number, name = len(self.sent), new_request_id()
        payload = await self.runtime.ledger.payloads.store(self.tenant, name, request) if as_stored else stored(request)
        new = NewOperation(
            self.tenant, self.sampler, number, OperationKind.SAMPLE, BASE, payload, digest(request), 3, id=name
        )
        async with self.runtime.database.write() as transaction:
            self.sent.append(await self.runtime.ledger.accept(transaction, new))
        return self.sent[-1]

    async def row(self, request: RequestId) -> Operation:
        """Return the sample's row."""
        async with self.runtime.database.read() as session:
            return (await session.scalars(select(Operation).where(Operation.id == request))).one()

    async def result(self, request: RequestId) -> SampleOutput:
        """Wait for the sample's result and return it."""
        status = await self.runtime.ledger.wait_until_final(self.tenant, request, seconds=SECONDS)
        assert status.state is OperationState.DONE, status.error_message
        found = await self.runtime.ledger.result(self.tenant, status)
        assert isinstance(found, SampleOutput)
        return found


async def make_drawer(runtime: Runtime) -> Drawer:
    """Make a tenant with a session and a sampler of the bare base."""
    async with runtime.database.write() as transaction:
        tenant = await create_tenant(transaction, name=f"drawer-{uuid4().hex[:6]}", clock=utc_now)
        session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        sampler = await create_sampler(transaction, tenant, NewSampler(session, 0, BASE, None, None, None), utc_now)
    return Drawer(runtime, tenant, sampler)


def make_sampling(
    runtime: Runtime, base: BaseModel, model: Path, forward: TrainerForward | None = None
) -> BaseSampling:
    """Wire a sampling process, and start nothing."""
    return wire_sampling(runtime, base.facts, read_vocabulary(model), [TorchSource(base, runtime.settings)], forward)
