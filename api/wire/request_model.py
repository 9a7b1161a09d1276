"""Base of every JSON request body, and the text fields that all of them use."""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from api.wire.json_counts import SMALL, JsonBounds, check_json_counts
from contracts.errors import InvalidRequest

NO_NUL = r"^[^\x00]*$"
"""Pattern of text without NUL, which PostgreSQL cannot hold."""

PlainText = Annotated[str, StringConstraints(pattern=NO_NUL)]
"""Text without NUL."""

T = TypeVar("T")


class _FirstProblem(FailFast):
    """pydantic's ``FailFast``, which a union can hold: it has a hash."""

    __hash__ = object.__hash__


ListOf = Annotated[list[T], _FirstProblem()]
"""A list whose first bad item is told. Telling all of a million would take minutes and gigabytes."""
MapOf = Annotated[dict[str, T], _FirstProblem()]
"""An object of any names whose first bad value is told."""


def _plain_json(value: Any) -> Any:
    """Return ``value`` as every database and client can hold it: no NaN, no integer beyond 64 bits."""
    try:
        return orjson.loads(orjson.dumps(value))
    except (TypeError, orjson.JSONDecodeError) as error:
        raise ValueError("a number is too large, or the nesting too deep") from error


PlainJson = Annotated[T, AfterValidator(_plain_json)]
"""Any JSON that is stored as it is; a number that is not finite becomes null."""


def text_values(given: Any) -> Any:
    """Return a JSON object with every value as text: SDKs send any JSON as metadata, and read only text."""
    if not isinstance(given, dict):
        return given
    try:
        return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in given.items()}
    except TypeError as error:
        raise ValueError("a number is too large, or the nesting too deep") from error


Metadata = Annotated[dict[str, str], BeforeValidator(text_values)]
"""A user's metadata, given with values of any JSON type."""


def _utc(time: datetime) -> datetime:
    """Return the time in UTC. Raises ``ValueError`` without a zone, or outside the years that every database and zone hold."""
    if time.tzinfo is None:
        raise ValueError("a time must have a zone, as in 2026-07-13T00:00:00Z")
    if not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        raise ValueError(f"the year must be {_FIRST_YEAR} to {_LAST_YEAR}")
    return time.astimezone(UTC)


_FIRST_YEAR, _LAST_YEAR = 1970, 9000
UtcTime = Annotated[datetime, AfterValidator(_utc)]
"""A time that a client sends, with a zone; in UTC from then on."""
UtcDay = Annotated[date, Field(ge=date(_FIRST_YEAR, 1, 2), le=date(_LAST_YEAR, 12, 31))]
"""A day (UTC) that a client sends. There is one before and one after it."""

_SHOWN_PROBLEMS = 3


class BodyPart(BaseModel):
    """A part of a request body. Unknown fields are ignored: old and new clients send some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class RequestModel(BodyPart):
    """A request body. A part that comes in thousands is a ``BodyPart``, which takes a tenth of the time to build."""

    tokenized: ClassVar[frozenset[str]] = frozenset()
    """Fields that become tokens and are stored as no text: a text of theirs may have NUL, which byte-level bases draw."""
    _sent: bytes = PrivateAttr(b"")

    @property
    def sent(self) -> bytes:
        """Bytes of the body that the model was read from; empty for a part of a body."""
        return self._sent


class DefaultingModel(RequestModel):
    """A request body, or a part of one, in which an explicit null means the default."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


M = TypeVar("M", bound=RequestModel)


def parse_json(model: type[M], body: bytes, bounds: JsonBounds = SMALL) -> M:
    """Return ``body`` as ``model``; an empty body counts as ``{}``.

    Raises ``InvalidRequest`` naming the field, or the bound that the body exceeds.
    """
    check_json_counts(body, bounds)
    try:
        parsed = model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidRequest(describe_problems(problems)) from None
    is_suspect = b"\\u0000" in body and b"\\u0000" in body.replace(b"\\\\", b"")
    if is_suspect and (not model.tokenized or _has_stored_nul(parsed)):
        raise InvalidRequest("the body has text with NUL (\\u0000), which no database holds; leave it out")
    parsed._sent = body
    return parsed


def _has_stored_nul(parsed: RequestModel) -> bool:
    """Return whether a text outside the ``tokenized`` fields has NUL; found without recursion."""
    fields = {**vars(parsed), **(parsed.model_extra or {})}
    left: list[Any] = [value for name, value in fields.items() if name not in parsed.tokenized]
    while left:
        node = left.pop()
        if isinstance(node, str) and "\0" in node:
            return True
        if isinstance(node, BaseModel):
            left += vars(node).values()
        elif isinstance(node, Mapping):
            left += [*node.keys(), *node.values()]
        elif isinstance(node, list):
            left += node
    return False


def describe_problems(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of pydantic's ``errors()``: each field and its problem, without the values that were sent."""
    texts = []
    for problem in problems[:_SHOWN_PROBLEMS]:
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        texts.append(f"{field}: {problem['msg']}")
    hidden = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(texts) + (f"; and {hidden} more" if hidden > 0 else "")
