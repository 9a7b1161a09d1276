"""Completions of operations: locks their runs, checks what has ended before, and gathers the rows that outcomes write."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.codec import encode
from contracts.errors import LeaseLost, OutcomeConflict, WeftError
from contracts.ledger_records import Completion, OperationState, RunLease
from contracts.operations import OperationKind
from ledger import statements as sql
from ledger.rows import finished_row
from ledger.settlement import cut_row
from ledger.step_points import GatheredPoints


@dataclass(slots=True)
class OutcomeRows:
    """Rows that completions write.

    - ``ended``: completions that end their operation, in the order given.
    - ``cut``: tokens of samples that had been cancelled before.
    """

    points: GatheredPoints
    ended: list[Completion] = field(default_factory=list)
    finished: list[dict[str, object]] = field(default_factory=list)
    results: list[dict[str, object]] = field(default_factory=list)
    cut: list[dict[str, Any]] = field(default_factory=list)

    async def write(self, transaction: AsyncSession) -> None:
        """Write states and results, and delete the payloads of what has failed."""
        if self.finished:
            await transaction.execute(sql.FINISH, self.finished)
            if failed := [row["operation_id"] for row in self.finished if row["new_state"] == OperationState.FAILED]:
                await transaction.execute(sql.DROP_PAYLOADS, {"ids": failed})
        if self.results:
            await transaction.execute(sql.INSERT_RESULT, self.results)

    @property
    def sampled_lanes(self) -> list[str]:
        """Lanes of the samples that end, in order."""
        return sorted({one.operation.lane for one in self.ended if one.operation.kind is OperationKind.SAMPLE})


def rows_of_outcomes(
    completions: Sequence[Completion], pending: Collection[str], steps: dict[str, int], now: datetime
) -> OutcomeRows:
    """Return the rows of the completions. ``pending``: operations that have not ended; ``steps``: optimizer steps by run."""
    rows = OutcomeRows(GatheredPoints(steps))
    open_ids = set(pending)
    for completion in completions:
        operation, outcome = completion.operation, completion.outcome
        if operation.id not in open_ids:
            drawn, cached = completion.sampled
            if drawn:
                rows.cut.append(cut_row(operation.id, operation.tokens, drawn, cached))
            continue
        open_ids.remove(operation.id)
        rows.ended.append(completion)
        rows.points.add(completion, now)
        body = None if isinstance(outcome, WeftError) else encode(outcome)
        rows.finished.append(finished_row(completion, now, result_bytes=None if body is None else len(body)))
        if body is not None:
            rows.results.append({"operation_id": operation.id, "tenant_id": operation.tenant, "body": body})
    return rows


async def lock_leased_runs(transaction: AsyncSession, completions: Sequence[Completion]) -> dict[str, int]:
    """Lock the runs of the training operations, and return their optimizer steps. Raises ``LeaseLost``."""
    leases = {one.operation.lane: one.operation.lease for one in _training(completions)}
    steps: dict[str, int] = {}
    if leases:
        for row in await transaction.execute(sql.LOCK_RUNS, {"lanes": sorted(leases)}):
            if leases[row.id] != RunLease(row.trainer_id, row.lease_token):
                raise LeaseLost(f"model {row.id} is trained elsewhere by now")
            steps[row.id] = row.optimizer_steps
    return steps


async def check_final(transaction: AsyncSession, completions: Sequence[Completion], *, anew: bool) -> None:
    """Raise ``OutcomeConflict`` when a training operation that is final already did not end as its completion says."""
    training = _training(completions)
    if not training:
        return
    ids = {"ids": [one.operation.id for one in training]}
    states = {row.id: row.state for row in await transaction.execute(sql.STATES, ids)}
    for completion in training:
        is_result = not isinstance(completion.outcome, WeftError)
        if anew or is_result != (states.get(completion.operation.id) == OperationState.DONE):
            raise OutcomeConflict(f"operation {completion.operation.id} has ended already")


def _training(completions: Sequence[Completion]) -> list[Completion]:
    return [one for one in completions if one.operation.kind is not OperationKind.SAMPLE]
