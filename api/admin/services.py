"""The record of everything the admin endpoints work with, composed by the command that starts the listener or works by itself."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Protocol

from fastapi import Depends, Request

from api.loop_time import LoopTime
from api.presented_key import presented_key
from api.wire.late_body import check_after_body
from contracts.errors import Unauthenticated
from contracts.ids import TenantId
from ledger.runtime import Runtime
from ledger.waiting import Waits
from store.database_clock import clock_of
from store.fair_places import OWN_WORK, ask_for
from tenants.audit_tally import AuditTally
from tenants.limits import Limits
from tenants.operator_keys import Operator
from tenants.request_rates import RequestRates
from tenants.signed_tokens import TokenSigner

OPERATORS = TenantId("operators")
"""All operators together, as one of those who share the event loop."""


@dataclass(frozen=True, slots=True)
class StepStanding:
    """One step of housekeeping. ``error``: failure of the run that was asked for; the times are those of the last runs."""

    step: str
    succeeded_at: datetime | None = None
    rows: int = 0
    seconds: float = 0.0
    behind_since: datetime | None = None
    failing_since: datetime | None = None
    has_run: bool = False
    error: str | None = None


class Housekeeper(Protocol):
    """Housekeeping as the admin API reaches it: the workers' own code, which the API does not import."""

    async def status(self) -> list[StepStanding]:
        """Return every step's last run."""

    async def run(self, step: str | None) -> list[StepStanding]:
        """Run a step, or all, until nothing is left. Raises ``InvalidRequest`` for an unknown one."""


Authenticate = Callable[[Request], Awaitable[Operator]]
"""Returns the operator that a request acts as. Raises ``Unauthenticated``."""


@dataclass(frozen=True, slots=True)
class AdminServices:
    """Parts of one admin API."""

    runtime: Runtime
    limits: Limits
    """Limits of a tenant without values of its own."""
    signer: TokenSigner
    authenticate: Authenticate
    housekeeper: Housekeeper
    audit_tally: AuditTally
    request_rates: RequestRates | None = None
    """Counts of tenants' requests, None where there are none: on the command line."""

    loop_time: LoopTime = field(default_factory=LoopTime)
    """Turns on the event loop, those of the tenants' API where it has the same loop."""

    def admit(self, secret: str | None) -> None:
        """Have the running task work for the service's operators, of whom one has shown ``secret``."""
        self.loop_time.know(secret, OPERATORS)
        ask_for(OWN_WORK)

    def refuse(self, secret: str | None) -> None:
        """Count requests with ``secret``, which is no operator's, as a stranger's."""
        self.loop_time.forget(secret)

    async def waits(self) -> Waits:
        """Return what tells why operations wait, by the database's time."""
        runtime = self.runtime
        return Waits(runtime.database, runtime.settings, runtime.data_folder, await clock_of(runtime.database))

    async def now(self) -> datetime:
        """Return the database's time."""
        return (await clock_of(self.runtime.database))()


async def get_admin(request: Request) -> AdminServices:
    """Return the services of the application that handles ``request``."""
    services: AdminServices = request.app.state.services
    return services


Admin = Annotated[AdminServices, Depends(get_admin)]


async def get_operator(request: Request, admin: Admin) -> Operator:
    """Return the operator that the request acts as. Raises ``Unauthenticated``, also after a late body."""
    operator = await _authenticated(admin, request)
    check_after_body(request, partial(_check_again, admin))
    return operator


async def _authenticated(admin: AdminServices, request: Request) -> Operator:
    secret = presented_key(request.headers)
    try:
        operator = await admin.authenticate(request)
    except Unauthenticated:
        admin.refuse(secret)
        raise
    admin.admit(secret)
    return operator


async def _check_again(admin: AdminServices, request: Request) -> None:
    """Raise ``Unauthenticated`` for an operator whose key has ended while the body came."""
    await _authenticated(admin, request)


Caller = Annotated[Operator, Depends(get_operator)]
"""Parameter type of every admin endpoint. Declare it before the body: a body without a valid key stays unread."""
