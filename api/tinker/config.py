"""What the SDK asks first: its flags. Also health, the one answer that needs no key."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from api.services import Caller

router = APIRouter(tags=["config"])
health_router = APIRouter(tags=["health"])


class ClientConfig(BaseModel):
    """Flags of ``/client/config``; the rest keep the SDK's defaults. These lead SDK 0.20 to 0.24 onto protobuf."""

    pjwt_auth_enabled: bool = False
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True


class DynamicConfig(BaseModel):
    """Flags that a live SDK client fetches again every ``refresh_interval_sec``."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


@router.post("/client/config")
async def client_config(_caller: Caller) -> ClientConfig:
    """The SDK's first call: a wrong key meets its 401 here."""
    return ClientConfig()


@router.post("/client/dynamic_config")
async def dynamic_config(_caller: Caller) -> DynamicConfig:
    """Flags that may change while a client lives."""
    return DynamicConfig()


@health_router.get("/healthz")
async def healthz() -> Health:
    """Liveness, without a key."""
    return Health()
