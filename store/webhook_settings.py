"""Settings of webhooks."""

from pydantic import Field, IPvAnyNetwork
from pydantic_settings import BaseSettings


class WebhookSettings(BaseSettings):
    """Addresses that tenants' webhooks may reach."""

    webhook_networks: tuple[IPvAnyNetwork, ...] = Field(
        default=(),
        description="Networks beside the public internet to which webhooks may be sent, such as `127.0.0.0/8`; `http://` is "
        "taken for addresses in them only. Every tenant reaches them: name none that trusts its callers.",
    )
