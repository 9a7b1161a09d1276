"""The OpenAPI document, with the bodies that endpoints read by themselves.

FastAPI describes the bodies that it parses. weft's are read once the caller is known, so each reader tells its model here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ATTRIBUTE = "weft_body_models"
_REFERENCE = "#/components/schemas/{model}"

F = TypeVar("F", bound=Callable[..., Any])
Models = tuple[type[BaseModel], ...]


def reads(*models: type[BaseModel]) -> Callable[[F], F]:
    """Return a decorator that tells the model of the JSON body that an endpoint or a dependency reads.

    Of several models the body is any one.
    """

    def declare(reader: F) -> F:
        setattr(reader, _ATTRIBUTE, models)
        return reader

    return declare


def _models_of(dependant: Dependant) -> Models:
    own: Models = getattr(dependant.call, _ATTRIBUTE, ())
    return own + tuple(model for one in dependant.dependencies for model in _models_of(one))


class DescribedApi(FastAPI):
    """An application whose OpenAPI document describes every JSON body."""

    def openapi(self) -> dict[str, Any]:
        """Return the document; it is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _described(super().openapi(), self)
        return self.openapi_schema


def _described(document: dict[str, Any], app: FastAPI) -> dict[str, Any]:
    bodies: dict[tuple[str, str], Models] = {}
    for route in iter_route_contexts(app.routes):
        known = route.original_route
        models = _models_of(route.dependant) if isinstance(known, APIRoute) and known.include_in_schema else ()
        if models:
            bodies |= {(str(route.path_format), method.lower()): models for method in route.methods or ()}
    read = sorted({one for models in bodies.values() for one in models}, key=lambda one: (one.__module__, one.__name__))
    references, schemas = models_json_schema([(model, "validation") for model in read], ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for (path, method), models in bodies.items():
        forms = [references[(model, "validation")] for model in models]
        content = {"application/json": {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
        document["paths"][path][method]["requestBody"] = {"content": content, "required": True}
    return document
