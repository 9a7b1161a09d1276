"""Endpoints with flags for the SDK, which fetches them before anything else and again while it lives."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.authentication import AnyKey
from api.route_bounds import bounded
from api.services import Services
from api.wire.sdk_version import exchanges_keys

router = APIRouter(tags=["config"])


class ClientConfig(BaseModel):
    """Flags of ``/client/config``; all others keep the SDK's defaults.

    ``pjwt_auth_enabled`` makes the SDK exchange its key for a token.
    ``proto_write_fwdbwd`` and ``fwd_via_fwdbwd`` make SDK 0.20 to 0.24 send protobuf.
    ``proto_compress_fwdbwd`` makes it compress that with zstd. With ``sample_join_sampling_session`` a copy of a sampling
    client asks for the number that its samples' seq_ids begin with, instead of drawing one by lot. With
    ``sample_use_retrieve_futures`` a sampling client has one poll for all its samples. With ``custom_loss_server_side`` it
    uploads a traced loss, which then runs here. Without ``use_pyqwest_transport`` SDKs from 0.22 on send with httpx.
    """

    pjwt_auth_enabled: bool = False
    use_pyqwest_transport: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    proto_compress_fwdbwd: bool = True
    create_model_via_load_weights: bool = True
    sample_join_sampling_session: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = True


class DynamicConfig(BaseModel):
    """Flags that a live SDK client fetches again every ``refresh_interval_sec``."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


@router.post("/client/config")
@bounded(is_counted=False)
async def client_config(_caller: AnyKey, services: Services, request: Request) -> ClientConfig:
    """Return the SDK's flags. The SDK calls this first, so a wrong key gets its 401 here."""
    settings = services.runtime.settings
    return ClientConfig(
        pjwt_auth_enabled=settings.sdk_tokens and exchanges_keys(request),
        use_pyqwest_transport=settings.sdk_pyqwest,
        parallel_fwdbwd_chunks=settings.sdk_parallel_chunks,
        proto_compress_fwdbwd=settings.sdk_compression,
        sample_use_retrieve_futures=settings.sdk_joint_polls,
        custom_loss_server_side=settings.sdk_custom_losses,
    )


@router.post("/client/dynamic_config")
@bounded(is_counted=False)
async def dynamic_config(_caller: AnyKey) -> DynamicConfig:
    """Return the flags that may change while a client lives."""
    return DynamicConfig()
