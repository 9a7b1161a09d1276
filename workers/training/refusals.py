"""Counts how often the database has refused an operation's outcome, for another reason than an outage.

An outcome is refused for what it is, as a number that no column holds: computed again, it is refused again.
"""

from contracts.errors import EngineFailure
from contracts.ids import RequestId
from contracts.ledger_records import ReadyOperation

MOST_REFUSALS = 3
"""Refusals after which the operation fails. One refusal may be a fault of the moment."""
_MOST_KNOWN = 1024
"""Operations whose refusals are remembered: some are cancelled meanwhile, and are never heard of again."""


class Refusals:
    """Refusals by operation."""

    def __init__(self) -> None:
        self._counts: dict[RequestId, int] = {}

    def is_last(self, operation: ReadyOperation) -> bool:
        """Count a refusal, and return whether the operation is to fail now. Its refusals are forgotten then."""
        count = self._counts.pop(operation.id, 0) + 1
        if count >= MOST_REFUSALS:
            return True
        if len(self._counts) >= _MOST_KNOWN:
            del self._counts[next(iter(self._counts))]
        self._counts[operation.id] = count
        return False

    def forget(self, operation: ReadyOperation) -> None:
        """Forget the refusals of an operation that is recorded."""
        self._counts.pop(operation.id, None)


def unrecorded(operation: ReadyOperation) -> EngineFailure:
    """Return the error that the operation's owner reads when its outcome was refused for the last time."""
    return EngineFailure(
        f"the result of this {operation.kind} could not be recorded, and nothing was changed; the service's log has the cause "
        f"(request {operation.id})"
    )
