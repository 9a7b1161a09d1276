"""Answers of the admin API as commands read them, also those of a service of another version."""

from enum import StrEnum
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import httpx2
from pydantic import BaseModel, Field, ValidationError, create_model

from api.wire.request_model import describe_problems
from contracts.errors import Unavailable

M = TypeVar("M", bound=BaseModel)


def read_answer(model: type[M], answer: httpx2.Response) -> M:
    """Return the answer's record. A word of a newer service stays text; a missing field that may be null is null.

    Raises ``Unavailable`` for what is no such record.
    """
    try:
        record: M = lenient(model).model_validate_json(answer.content)
    except ValidationError as error:
        problems, asked = describe_problems(error.errors()), answer.request
        raise Unavailable(
            f"the answer to {asked.method} {asked.url.path} cannot be read ({problems}): the service is of another version "
            "than this command, or this is not the address of its admin API"
        ) from None
    return record


@cache
def lenient(model: type[M]) -> type[M]:
    """Return a model that reads what ``model`` does, and unknown words and missing fields that may be null besides."""
    read: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = _lenient(field.annotation)
        may_be_missing = field.is_required() and NoneType in get_args(kind)
        if may_be_missing or kind != field.annotation:
            read[name] = (kind, None if may_be_missing else field)
    return create_model(model.__name__, __base__=model, **read)


def _lenient(kind: Any) -> Any:
    if parts := get_args(kind):
        origin, inner = get_origin(kind), [_lenient(part) for part in parts]
        return reduce(or_, inner) if origin in (Union, UnionType) else origin[tuple(inner)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return lenient(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        # Left to right: text that is a known word becomes that word.
        return Annotated[kind | str, Field(union_mode="left_to_right")]
    return kind
