"""Endpoint that lists the served base models."""

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from api.authentication import AnyKey
from api.route_bounds import bounded
from api.services import Services

router = APIRouter(tags=["capabilities"])


class SupportedModel(BaseModel):
    """A served base model; ``max_context_length`` is in tokens."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class Capabilities(BaseModel):
    """Answer of ``/get_server_capabilities``."""

    supported_models: list[SupportedModel]


@router.get("/get_server_capabilities")
@bounded(is_counted=False)
async def get_server_capabilities(_caller: AnyKey, services: Services) -> Capabilities:
    """List the served base models by name."""
    return Capabilities(
        supported_models=[
            SupportedModel(model_name=name, max_context_length=facts.context_length)
            for name, facts in sorted(services.bases.items())
        ]
    )
