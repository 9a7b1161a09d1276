"""Repeats of operators' changes: with an ``Idempotency-Key`` a change is made once, and a repeat is answered like the first."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.bodies import IdempotencyKey
from api.admin.services import Admin, AdminServices, Caller
from tenants.operator_answers import RepeatableChange

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Repeats:
    """A request as one that may be repeated: with an ``Idempotency-Key``, else with None."""

    admin: AdminServices
    request: Request
    operator: str
    key: str | None

    async def once(
        self, transaction: AsyncSession, body: BaseModel | None, answer: type[M], make: Callable[[], Awaitable[M]]
    ) -> M:
        """Return what ``make`` answers, or what it has answered to the first request with this ``Idempotency-Key``.

        Raises ``SequenceConflict`` for a key that was sent with another request.
        """
        if not self.key:
            return await make()
        asked = (self.request.method, self.request.url.path, "" if body is None else body.model_dump_json())
        change = RepeatableChange(self.operator, self.key, asked)

        async def told() -> str:
            return (await make()).model_dump_json()

        return answer.model_validate_json(await change.made_once(transaction, told, self.admin.runtime.clock()))


async def get_repeats(
    caller: Caller, admin: Admin, request: Request, idempotency_key: IdempotencyKey = None
) -> Repeats:
    """Return the request as one that may be repeated."""
    return Repeats(admin, request, caller.name, idempotency_key)


Once = Annotated[Repeats, Depends(get_repeats)]
"""Parameter of an endpoint whose change is made once."""
