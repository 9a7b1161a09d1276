"""Statement parameters as every database can hold them: the one place where text and numbers reach the database."""

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.errors import InvalidRequest

_UNHELD = re.compile("[\0\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_MOST = 2**63


def clean_parameters(engine: AsyncEngine) -> None:
    """Have ``engine`` replace NUL and lone surrogates in text, which PostgreSQL or UTF-8 cannot hold.

    An integer beyond 64 bits raises ``InvalidRequest`` instead of a driver's error.
    """

    @event.listens_for(engine.sync_engine, "before_cursor_execute", retval=True)
    def clean(
        _connection: object, _cursor: object, statement: str, parameters: Any, _context: object, many: bool
    ) -> tuple[str, Any]:
        if not parameters:
            return statement, parameters
        # Rows that are inserted by one statement and returned have their values in one sequence.
        is_many = many and isinstance(parameters, list)
        return statement, [_cleaned(one) for one in parameters] if is_many else _cleaned(parameters)


def _cleaned(parameters: Any) -> Any:
    if isinstance(parameters, dict):
        return dict(zip(parameters, _cleaned(list(parameters.values())), strict=True))
    return parameters if all(map(_is_held, parameters)) else _replaced(parameters)


def _is_held(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-_MOST <= value < _MOST)
    # A StrEnum's values are weft's own.
    return kind is not str or ("\0" not in value and (value.isascii() or _UNHELD.search(value) is None))


def _replaced(parameters: Sequence[Any]) -> tuple[Any, ...]:
    if any(type(value) is int and not _is_held(value) for value in parameters):
        raise InvalidRequest("a number is beyond 64 bits; send a smaller one")
    return tuple(_UNHELD.sub(_REPLACEMENT, value) if type(value) is str else value for value in parameters)
