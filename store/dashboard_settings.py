"""Settings of the dashboard."""

from datetime import timedelta

from pydantic import Field
from pydantic_settings import BaseSettings


class DashboardSettings(BaseSettings):
    """Life of the dashboard's sessions, and the one exception from its rule on https."""

    web_session_idle: timedelta = Field(
        default=timedelta(hours=8),
        gt=timedelta(0),
        description="Time after which a web session of the dashboard ends that nobody used. A page that is left open is no use.",
    )
    web_session_lifetime: timedelta = Field(
        default=timedelta(hours=24),
        gt=timedelta(0),
        description="Longest life of a web session of the dashboard. Then its user logs in again.",
    )
    insecure_ui: bool = Field(
        default=False,
        description="Let people log in to the dashboard over plain http from other machines, where everybody on the way can "
        "read their session. Every page then shows a warning.",
    )
