"""Settings of webhooks."""

from pydantic import Field, IPvAnyNetwork
from pydantic_settings import BaseSettings


class WebhookSettings(BaseSettings):
    """Settings of webhooks: whether they are sent, and which addresses they may reach."""

    webhook_networks: tuple[IPvAnyNetwork, ...] = Field(
        default=(),
        description="Networks beside the public internet to which webhooks may be sent, such as `127.0.0.0/8`; `http://` is "
        "taken for addresses in them only. Every tenant reaches them: name none that trusts its callers.",
    )
    send_webhooks: bool = Field(
        default=True,
        description="Send events to tenants' webhooks. Off: events are kept and wait, as on a copy of a service that is tried "
        "beside it. Set it for every process that does housekeeping.",
    )
