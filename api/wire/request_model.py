"""Base of every JSON request body, and the text fields that all of them use."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, StringConstraints, ValidationError, model_validator

from contracts.errors import InvalidRequest

NO_NUL = r"^[^\x00]*$"
"""Pattern of text without NUL, which PostgreSQL cannot hold."""

PlainText = Annotated[str, StringConstraints(pattern=NO_NUL)]
"""Text without NUL."""

_SHOWN_PROBLEMS = 3


class RequestModel(BaseModel):
    """A request body, or a part of one. Unknown fields are ignored: old and new clients send some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

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


def parse_json(model: type[M], body: bytes) -> M:
    """Return ``body`` as ``model``; an empty body counts as ``{}``. Raises ``InvalidRequest`` naming the field."""
    try:
        found = model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InvalidRequest(describe_problems(error.errors(include_url=False))) from error
    found._sent = body
    return found


def describe_problems(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of pydantic's ``errors()``: each field and its problem, without the values that were sent."""
    texts = []
    for problem in problems[:_SHOWN_PROBLEMS]:
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        texts.append(f"{field}: {problem['msg']}")
    hidden = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(texts) + (f"; and {hidden} more" if hidden > 0 else "")
