"""Operations whose tokens count, in usage and in what is added up of it."""

from sqlalchemy import and_, or_

from contracts.errors import CANCELLED_CODES
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from store.tables import Operation

IS_METERED = or_(
    Operation.state == OperationState.DONE,
    and_(Operation.kind == OperationKind.SAMPLE, Operation.error_code.in_(CANCELLED_CODES), Operation.tokens > 0),
)
"""Done operations, and samples that were cancelled after some tokens.

Training that was cancelled was never computed, or its outcome was refused.
"""
