"""Ends of samples in the ledger: results, reports, and the records by which training may name them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from contracts.errors import EngineFailure, WeftError
from contracts.ledger_records import Completion, ReadyOperation
from contracts.operations import SampleOutput, SampleRequest
from contracts.provenance import encode_sample_record
from contracts.sample_report import SampleReport
from ledger.runtime import Runtime
from ledger.wakeups import cleared_samples_topic
from tenants.gates import clear_in_flight
from tenants.limits import Limits
from tenants.sample_records import NewRecord, record_samples
from tenants.sample_reports import record_reports
from workers.sampling.continuation import Continuation


@dataclass(frozen=True, slots=True)
class FailedSample:
    """Failure of a sample. ``drawn`` and ``cached`` are its tokens that count as usage."""

    error: WeftError
    drawn: int = 0
    cached: int = 0

    @classmethod
    def after(cls, error: WeftError, continuation: Continuation) -> Self:
        """Return the failure of a sample that has drawn tokens. They count unless the fault is the service's."""
        if error.category != "user":
            return cls(error)
        return cls(error, continuation.made, continuation.cached)


Outcome = tuple[SampleOutput, SampleReport] | FailedSample


def tokens_used(operation: ReadyOperation, outcome: Outcome) -> int:
    """Return the tokens that the sample took of its tenant's turn, those of its prompt included."""
    if isinstance(outcome, FailedSample):
        return operation.tokens + outcome.drawn if outcome.drawn else 0
    return operation.tokens + outcome[0].drawn


def unrecorded(operation: ReadyOperation) -> FailedSample:
    """Return the end of a sample whose outcome cannot be recorded."""
    failed = f"weft could not record this sample; the service's log has the cause ({operation.id})"
    return FailedSample(EngineFailure(failed))


class SampleEndings:
    """Writes how one base model's samples ended that the process ``process`` drew."""

    def __init__(self, runtime: Runtime, base_model: str, process: str) -> None:
        self._runtime = runtime
        self._base_model = base_model
        self._process = process
        self._limits = Limits.of(runtime.settings)

    async def record(self, ends: Sequence[tuple[ReadyOperation, Outcome]]) -> list[None]:
        """Write the results and reports, and delete the in-flight rows, in one transaction.

        What this process drew while it counted as dead is dropped, if its samples are others' by then: clients may have read
        other tokens of them.
        """
        completions, reports, recorded = [], [], []
        for operation, outcome in ends:
            if isinstance(outcome, FailedSample):
                completions.append(Completion(operation, outcome.error, outcome.drawn, outcome.cached))
                continue
            output, report = outcome
            completions.append(Completion(operation, output))
            reports.append((operation.tenant, operation.id, report))
            if isinstance(operation.payload, SampleRequest) and operation.payload.is_recorded:
                recorded.append((operation, operation.payload, output))
        # Encoding a long sample takes many milliseconds, for which other samples would wait.
        records = await asyncio.to_thread(_records_of, recorded) if recorded else []
        now, kept = self._runtime.clock(), self._runtime.settings.retention_sample_records
        async with self._runtime.database.write() as transaction:
            lost = await self._runtime.ledger.complete(transaction, completions, process=self._process)
            await clear_in_flight(transaction, [operation.id for operation, _ in ends], self._process)
            await record_reports(transaction, [one for one in reports if one[1] not in lost])
            kept_records = [one for one in records if one.operation not in lost]
            await record_samples(transaction, kept_records, self._limits, now=now, expires_at=now + kept)
            self._runtime.ledger.wakeups.announce_after_commit(transaction, cleared_samples_topic(self._base_model))
        return [None] * len(ends)


def _records_of(recorded: Sequence[tuple[ReadyOperation, SampleRequest, SampleOutput]]) -> list[NewRecord]:
    """Return the records by which training may name these samples, without those that are too large."""
    bodies = ((operation, encode_sample_record(request, output)) for operation, request, output in recorded)
    return [NewRecord(one.id, one.tenant, one.lane, body) for one, body in bodies if body is not None]
