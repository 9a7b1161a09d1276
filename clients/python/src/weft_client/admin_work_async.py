"""Runs, queues and processes for operators, with asyncio. ``admin_work_sync`` is made of this file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from weft_client.admin_calls import below_checkpoints, call, listed, once, path, patient, sent_once
from weft_client.modules import Later
from weft_client.transport_async import AsyncTransport

if TYPE_CHECKING:
    from weft_client import admin_models as m
    from weft_client.models import GateMode, GateOf, OperationState, ReplicaDirective
else:
    m = Later("weft_client.admin_models")


class AsyncAdminRuns:
    """Runs of all tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        tenant: str | None = None,
        base_model: str | None = None,
        trainer: str | None = None,
        state: str | None = None,
    ) -> AsyncIterator[m.RunBody]:
        """Yield runs, page by page: of the tenant of that id, of a base, of a trainer, in a state."""
        which = {"tenant_id": tenant, "base_model": base_model, "trainer": trainer, "state": state}
        async for one in self._transport.every(listed("/runs", m.Page[m.RunBody], **which)):
            yield one

    async def get(self, run: str, *, events: int = 50) -> m.RunDetails:
        """Describe a run: who trains it, why it waits, and its last ``events``."""
        return await self._transport.send(call("GET", path("runs", run), m.RunDetails, query={"events": events}))

    async def move(self, run: str, *, to: str | None = None, reason: str = "") -> m.DirectedRunBody:
        """Have a run go to another trainer, to that one or to any."""
        body = {"to": to, "reason": reason}
        asked = call("POST", path("runs", run, "move"), m.DirectedRunBody, body=body, headers=once(None))
        return await self._transport.send(asked)

    async def weigh(self, run: str, weight: float) -> m.RunBody:
        """Give a run a weight among its tenant's runs, from the next pass on."""
        return await self._transport.send(call("PUT", path("runs", run, "weight"), m.RunBody, body={"weight": weight}))

    async def evict(self, run: str, *, reason: str = "") -> m.DirectedRunBody:
        """Have a run's adapter leave its trainer's memory until its next operation."""
        body = {"reason": reason}
        asked = call("POST", path("runs", run, "eviction"), m.DirectedRunBody, body=body, headers=once(None))
        return await self._transport.send(asked)


class AsyncAdminSessions:
    """Sessions of all tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, tenant: str | None = None, is_open: bool | None = None) -> AsyncIterator[m.SessionBody]:
        """Yield sessions, page by page: of the tenant of that id, open ones or ended ones."""
        pages = listed("/sessions", m.Page[m.SessionBody], tenant_id=tenant, is_open=is_open)
        async for one in self._transport.every(pages):
            yield one

    async def get(self, session: str) -> m.SessionDetails:
        """Describe a session with its runs and samplers."""
        return await self._transport.send(call("GET", path("sessions", session), m.SessionDetails))

    async def end(self, session: str, *, reason: str = "") -> m.EndedSession:
        """End a session; its pending operations are cancelled."""
        below, body = path("sessions", session, "end"), {"reason": reason}
        asked = call("POST", below, m.EndedSession, body=body, headers=once(None))
        return await self._transport.send(asked)


class AsyncOperations:
    """Operations of all tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        state: OperationState = "pending",
        tenant: str | None = None,
        lane: str | None = None,
        kind: str | None = None,
    ) -> AsyncIterator[m.OperationBody]:
        """Yield operations, page by page: of the tenant of that name, of a lane, of a kind."""
        which = {"state": state, "tenant": tenant, "lane": lane, "kind": kind}
        async for one in self._transport.every(listed("/operations", m.Page[m.OperationBody], **which)):
            yield one

    async def get(self, operation: str) -> m.OperationBody:
        """Describe an operation, and why it waits."""
        return await self._transport.send(call("GET", path("operations", operation), m.OperationBody))

    async def cancel(self, operation: str, *, reason: str = "") -> m.TouchedOperation:
        """End a pending operation, as its tenant may."""
        below = path("operations", operation, "cancellation")
        asked = call("POST", below, m.TouchedOperation, body={"reason": reason}, headers=once(None))
        return await self._transport.send(asked)

    async def fail(self, operation: str, *, reason: str = "") -> m.TouchedOperation:
        """End a pending operation as the service's failure."""
        below = path("operations", operation, "failure")
        asked = call("POST", below, m.TouchedOperation, body={"reason": reason}, headers=once(None))
        return await self._transport.send(asked)

    async def requeue(self, operation: str) -> m.TouchedOperation:
        """Have a pending operation begun anew."""
        below = path("operations", operation, "requeue")
        return await self._transport.send(call("POST", below, m.TouchedOperation, headers=once(None)))


class AsyncAdminCheckpoints:
    """Checkpoints of all tenants, by ``tinker://`` path."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self, *, tenant: str | None = None, run: str | None = None, expires_within: int | None = None
    ) -> AsyncIterator[m.CheckpointBody]:
        """Yield checkpoints, page by page: of the tenant of that id, of a run, or that expire within some seconds."""
        which = {"tenant_id": tenant, "run": run, "expires_within": expires_within}
        async for one in self._transport.every(listed("/checkpoints", m.Page[m.CheckpointBody], **which)):
            yield one

    async def get(self, checkpoint: str) -> m.CheckpointBody:
        """Describe a checkpoint."""
        return await self._transport.send(call("GET", below_checkpoints(checkpoint), m.CheckpointBody))

    async def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint, as its tenant may."""
        await self._transport.send_only(call("DELETE", below_checkpoints(checkpoint)))


class AsyncBases:
    """Weights that the names of base models stand for."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[m.BaseBody]:
        """Yield the base models that were ever served."""
        async for one in self._transport.every(listed("/bases", m.Page[m.BaseBody])):
            yield one

    async def accept(self, base_model: str, fingerprint: str) -> m.BaseBody:
        """Have a name stand for the weights with that fingerprint from now on."""
        body = {"fingerprint": fingerprint}
        return await self._transport.send(call("PUT", path("bases", base_model), m.BaseBody, body=body))


class AsyncAdminGates:
    """Gates of adapters and of bases."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, base_model: str | None = None) -> AsyncIterator[m.GateBody]:
        """Yield gates, page by page."""
        async for one in self._transport.every(listed("/gates", m.Page[m.GateBody], base_model=base_model)):
            yield one

    async def get(self, of: GateOf, name: str) -> m.GateBody:
        """Describe the gate of an adapter (its run) or of a pool (its base)."""
        return await self._transport.send(call("GET", path("gates", of, name), m.GateBody))

    async def pause(
        self,
        of: GateOf,
        name: str,
        *,
        mode: GateMode = "keep",
        reason: str = "",
        ttl_seconds: float | None = None,
        clear_cache: bool = False,
    ) -> m.GateBody:
        """Close a gate, for ``ttl_seconds`` at most."""
        body = {"mode": mode, "reason": reason, "ttl_seconds": ttl_seconds, "clear_cache": clear_cache}
        return await self._transport.send(call("PUT", path("gates", of, name), m.GateBody, body=body))

    async def resume(self, of: GateOf, name: str) -> m.GateBody:
        """Open a gate."""
        return await self._transport.send(call("DELETE", path("gates", of, name), m.GateBody))


class AsyncReplicas:
    """Replicas of bases, and what they are directed to do."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, base_model: str | None = None) -> AsyncIterator[m.ReplicaBody]:
        """Yield the replicas that have a directive or work."""
        async for one in self._transport.every(listed("/replicas", m.Page[m.ReplicaBody], base_model=base_model)):
            yield one

    async def direct(
        self, replica: str, directive: ReplicaDirective, *, base_model: str, reason: str = ""
    ) -> m.ReplicaBody:
        """Drain a replica, or put it to sleep."""
        body = {"base_model": base_model, "directive": directive, "reason": reason}
        return await self._transport.send(call("PUT", path("replicas", replica), m.ReplicaBody, body=body))

    async def work(self, replica: str, *, base_model: str) -> None:
        """Have a replica work again."""
        await self._transport.send_only(call("DELETE", path("replicas", replica), query={"base_model": base_model}))


class AsyncTrainers:
    """Trainers."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[m.TrainerBody]:
        """Yield the trainers."""
        async for one in self._transport.every(listed("/trainers", m.Page[m.TrainerBody])):
            yield one

    async def drain(self, trainer: str, *, reason: str = "") -> m.DrainedTrainer:
        """Have a trainer hand its runs to others in order, and take none."""
        asked = call("PUT", path("trainers", trainer, "drain"), m.DrainedTrainer, body={"reason": reason})
        return await self._transport.send(asked)

    async def work(self, trainer: str) -> m.TrainerBody:
        """Have a drained trainer take runs again."""
        return await self._transport.send(call("DELETE", path("trainers", trainer, "drain"), m.TrainerBody))


class AsyncPools:
    """Sampling processes."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[m.PoolBody]:
        """Yield the sampling processes."""
        async for one in self._transport.every(listed("/pools", m.Page[m.PoolBody])):
            yield one


class AsyncApis:
    """API processes."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[m.ApiBody]:
        """Yield the API processes."""
        async for one in self._transport.every(listed("/apis", m.Page[m.ApiBody])):
            yield one


class AsyncEndedProcesses:
    """Processes that died in the last hour."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> AsyncIterator[m.EndedBody]:
        """Yield them, the latest first, with who has their runs now."""
        async for one in self._transport.every(listed("/ended-processes", m.Page[m.EndedBody])):
            yield one


class AsyncQueue:
    """The queue of accepted work."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def lines(self) -> AsyncIterator[m.QueueLine]:
        """Yield what waits by base and kind, and who fills it."""
        async for one in self._transport.every(listed("/queue", m.Page[m.QueueLine])):
            yield one

    async def placements(self, *, base_model: str | None = None) -> AsyncIterator[m.PlacementBody]:
        """Yield the runs that wait for a trainer."""
        pages = listed("/placements", m.Page[m.PlacementBody], base_model=base_model)
        async for one in self._transport.every(pages):
            yield one


class AsyncHousekeeping:
    """Steps of housekeeping."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def steps(self) -> AsyncIterator[m.StepBody]:
        """Yield each step with its last run."""
        async for one in self._transport.every(listed("/housekeeping", m.Page[m.StepBody])):
            yield one

    async def run(self, step: str | None = None) -> m.Page[m.StepBody]:
        """Run a step now, or all of them, each until nothing is left; this may take an hour.

        Raises ``OutcomeUnknown`` where the answer is lost: the run goes on, and ``steps`` tells of its end.
        """
        asked = call("POST", "/housekeeping/runs", m.Page[m.StepBody], body={"step": step})
        return await self._transport.send(sent_once(patient(asked)))
