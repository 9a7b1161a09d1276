"""Operations whose tokens count, and the sums that usage is made of."""

from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, literal, or_

from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from store.tables import Operation

IS_METERED = or_(
    Operation.state == OperationState.DONE,
    and_(Operation.kind == OperationKind.SAMPLE, Operation.sampled_tokens > 0),
)
"""Done operations, and failed samples with drawn tokens that count: of one that the service has failed none are recorded.

Training that was cancelled was never computed, or its outcome was refused.
"""
SUMS = ("operations", "failed", "train_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens")
"""Columns of usage that are added up."""


def sums_of_ended() -> list[ColumnElement[Any]]:
    """Return ``SUMS`` of operations that have ended, as columns of a query that groups them."""
    is_done, is_sample = Operation.state == OperationState.DONE, Operation.kind == OperationKind.SAMPLE

    def sum_where(value: ColumnElement[Any], *conditions: ColumnElement[bool]) -> ColumnElement[Any]:
        return func.sum(case((and_(*conditions), value), else_=0))

    one = literal(1)
    sums = {
        "operations": sum_where(one, is_done),
        "failed": sum_where(one, ~is_done),
        "train_tokens": sum_where(Operation.tokens.expression, IS_METERED, ~is_sample),
        "prompt_tokens": sum_where(Operation.tokens - Operation.sampled_tokens, IS_METERED, is_sample),
        "cached_prompt_tokens": sum_where(Operation.cached_tokens.expression, IS_METERED, is_sample),
        "sampled_tokens": sum_where(Operation.sampled_tokens.expression, IS_METERED, is_sample),
    }
    return [sums[name].label(name) for name in SUMS]
