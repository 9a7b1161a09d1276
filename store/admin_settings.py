"""Settings of the operators' own listener, and of what operators do to tenants."""

from datetime import timedelta

from pydantic import Field
from pydantic_settings import BaseSettings


class AdminSettings(BaseSettings):
    """Address of the admin API, apart from the API's port, which tenants can reach."""

    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the admin API, for operators' keys only (`weft operator create`). API processes of one "
        "cluster may share it. 0 picks a free one and logs it. Default: off.",
    )
    deletion_grace: timedelta = Field(
        default=timedelta(days=7),
        ge=timedelta(0),
        description="Time between `weft tenant delete` and the removal of what the tenant has. Till then it can be restored.",
    )
    admin_host: str = Field(default="127.0.0.1", description="Address on which the admin port listens.")
