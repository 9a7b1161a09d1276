"""JSON bodies as parameters of endpoints, read only after the caller is known.

FastAPI reads and parses a declared body before it runs the dependencies, so that a stranger could make it parse
megabytes. A body taken through ``json_body``, in a parameter after ``caller``, is untouched until the key was checked.
"""

from typing import Annotated, Any

from fastapi import Depends, Path, Request

from api.authentication import Caller
from api.openapi_document import reads
from api.request_body import off_loop, request_body
from api.services import Services
from api.wire.json_counts import SMALL, JsonBounds
from api.wire.request_model import NO_NUL, RequestModel, parse_json

PathId = Annotated[str, Path(pattern=NO_NUL)]
"""An id in the path, not yet looked up."""


def json_body(model: type[RequestModel], counts: JsonBounds = SMALL) -> Any:
    """Return a dependency that yields the body as ``model``. Raises as ``parse_json`` and ``request_body``."""

    @reads(model)
    async def parse(request: Request, services: Services, caller: Caller) -> RequestModel:
        async with request_body(request, services, caller.tenant) as body:
            return await off_loop(services, caller.tenant, len(body), parse_json, model, body, counts)

    return Depends(parse)
