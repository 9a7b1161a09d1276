"""Answers to operators' changes: a change that is sent again with its ``Idempotency-Key`` is answered like the first time.

The answer is written in the change's transaction, so it is there if and only if the change was made.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import SequenceConflict
from store.deletions import delete_some
from store.inserts import insert_unless_present
from store.tables import OperatorAnswer


@dataclass(frozen=True, slots=True)
class RepeatableChange:
    """Change that ``operator`` asks for with an ``Idempotency-Key``. ``asked``: its route, path and body."""

    operator: str
    key: str
    asked: tuple[str, ...]

    @property
    def id(self) -> str:
        """Id under which the answer is found again."""
        return _digest(self.operator, self.key)

    async def made_once(self, transaction: AsyncSession, make: Callable[[], Awaitable[str]], now: datetime) -> str:
        """Return what ``make`` answers, or what it has answered to the same request before, without calling it.

        Raises ``SequenceConflict`` for a key that was sent with another request.
        """
        asked = _digest(*self.asked)
        # A repeat that comes at the same time waits here until the first one has ended.
        row = insert_unless_present(transaction, OperatorAnswer).values(id=self.id, asked=asked, answer="", at=now)
        if (await transaction.execute(row.returning(OperatorAnswer.id))).scalar_one_or_none() is None:
            return await self._answer_before(transaction, asked)
        answer = await make()
        await transaction.execute(update(OperatorAnswer).where(OperatorAnswer.id == self.id).values(answer=answer))
        return answer

    async def _answer_before(self, session: AsyncSession, asked: str) -> str:
        columns = select(OperatorAnswer.asked, OperatorAnswer.answer).where(OperatorAnswer.id == self.id)
        found = (await session.execute(columns)).one()
        if found.asked != asked:
            raise SequenceConflict("this Idempotency-Key was sent with another request; send another one")
        return str(found.answer)


async def forget_answers(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Forget at most ``most`` answers that were given before ``before``; return how many."""
    old = OperatorAnswer.at < before
    return await delete_some(transaction, OperatorAnswer, old, most=most, first=OperatorAnswer.at)


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()
