"""JSON bodies as parameters of endpoints, read only after the caller is known.

FastAPI reads and parses a declared body before it runs the dependencies, so that a stranger could make it parse
megabytes. A body taken through ``json_body``, in a parameter after ``caller``, is untouched until the key was checked.
"""

from typing import Annotated, Any

from fastapi import Depends, Path, Request

from api.services import Services
from api.wire.body import read_body
from api.wire.request_model import NO_NUL, RequestModel, parse_json

PathId = Annotated[str, Path(pattern=NO_NUL)]
"""An id in the path, not yet looked up."""


def json_body(model: type[RequestModel]) -> Any:
    """Return a dependency that yields the body as ``model``. Raises as ``parse_json``, and ``PayloadTooLarge``."""

    async def parse(request: Request, services: Services) -> RequestModel:
        return parse_json(model, await read_body(request, services.runtime.settings.max_body_bytes))

    return Depends(parse)
