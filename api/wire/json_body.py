"""Small JSON bodies as typed records, read only after the caller is known.

FastAPI would read and parse a declared body before it runs the dependencies, so a stranger could make it parse
megabytes; a body taken through ``json_body`` in a parameter after ``caller`` is not touched until the key was checked.
"""

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from api.errors import describe_problems
from api.services import Services
from api.wire.body import read_body
from contracts.errors import InvalidRequest

_NO_NUL = r"^[^\x00]*$"

PlainText = Annotated[str, StringConstraints(pattern=_NO_NUL)]
"""Text without NUL, which PostgreSQL cannot hold."""
PathId = Annotated[str, Path(pattern=_NO_NUL)]
"""An id in the path: unverified text."""


class RequestModel(BaseModel):
    """A request body: unknown fields are ignored, as old and new SDKs send them."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


M = TypeVar("M", bound=RequestModel)


def parse_json(model: type[M], body: bytes) -> M:
    """``body`` as ``model``; an empty one is ``{}``. Raises ``InvalidRequest`` naming the field."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InvalidRequest(describe_problems(error.errors(include_url=False))) from error


def json_body(model: type[RequestModel]) -> Any:
    """A dependency that gives the body as ``model``. Raises as ``parse_json`` does, and ``PayloadTooLarge``."""

    async def parse(request: Request, services: Services) -> RequestModel:
        return parse_json(model, await read_body(request, services.settings.max_body_bytes))

    return Depends(parse)
