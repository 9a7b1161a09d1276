"""The client of operators with asyncio. ``admin_sync`` is made of this file (``clients/python/make_sync.py``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from weft_client.admin_calls import call, listed, once, path, patient, sent_once
from weft_client.admin_webhooks_async import AsyncTenantsWebhooks
from weft_client.admin_work_async import (
    AsyncAdminCheckpoints,
    AsyncAdminGates,
    AsyncAdminRuns,
    AsyncAdminSessions,
    AsyncApis,
    AsyncBases,
    AsyncEndedProcesses,
    AsyncHousekeeping,
    AsyncOperations,
    AsyncPools,
    AsyncQueue,
    AsyncReplicas,
    AsyncTrainers,
)
from weft_client.call import Call
from weft_client.modules import Later
from weft_client.raw_responses import NotedResponses, RawResponse
from weft_client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Endpoint
from weft_client.transport_async import AsyncTransport

if TYPE_CHECKING:
    import httpx

    from weft_client import admin_models as m
    from weft_client.models import (
        BucketWidth,
        Dimension,
        Period,
        PriceMeter,
        Role,
        ServiceClass,
        SuspendMode,
        UsageDocument,
    )
else:
    m = Later("weft_client.admin_models")

P = ParamSpec("P")
R = TypeVar("R")


class AsyncTenants:
    """Tenants: made, bounded, suspended and deleted."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, name: str | None = None) -> AsyncIterator[m.TenantBody]:
        """Yield all tenants, page by page, or the one of that name."""
        async for one in self._transport.every(listed("/tenants", m.Page[m.TenantBody], name=name)):
            yield one

    async def shares(self) -> AsyncIterator[m.TenantShares]:
        """Yield all tenants with what they were served, and what they are entitled to."""
        async for one in self._transport.every(listed("/shares", m.Page[m.TenantShares])):
            yield one

    async def create(self, name: str, *, idempotency_key: str | None = None) -> m.MadeTenant:
        """Make a tenant and its first key, whose secret is in the answer only."""
        asked = call("POST", "/tenants", m.MadeTenant, body={"name": name}, headers=once(idempotency_key))
        return await self._transport.send(asked)

    async def get(self, tenant: str) -> m.TenantBody:
        """Describe the tenant of that id."""
        return (await self._versioned(tenant))[0]

    async def change(
        self,
        tenant: str,
        *,
        limits: Mapping[str, int | None] | None = None,
        share: float | None = None,
        service_class: ServiceClass | None = None,
        if_match: str | None = None,
    ) -> m.TenantBody:
        """Give the tenant limits of its own (None: the default again), a share or a class.

        ``if_match`` is the ``ETag`` of the state that is changed (``with_raw_response``); without one the state is read
        first. Raises ``EditConflict`` if somebody else has changed it since, ``OutcomeUnknown`` if the answer is lost.
        """
        version = (await self._versioned(tenant))[1] if if_match is None else if_match
        body = {"limits": None if limits is None else dict(limits), "share": share, "service_class": service_class}
        asked = call("PATCH", path("tenants", tenant), m.TenantBody, body=body, headers={"If-Match": version})
        return await self._transport.send(sent_once(asked))

    async def suspend(self, tenant: str, *, mode: SuspendMode = "hold", reason: str = "") -> m.TenantBody:
        """Have the tenant's accepted work wait, and refuse new work or everything, as ``mode`` says."""
        body = {"mode": mode, "reason": reason}
        return await self._transport.send(call("PUT", path("tenants", tenant, "suspension"), m.TenantBody, body=body))

    async def resume(self, tenant: str) -> m.TenantBody:
        """Have a suspended tenant's work go on."""
        return await self._transport.send(call("DELETE", path("tenants", tenant, "suspension"), m.TenantBody))

    async def standing(self, tenant: str) -> m.StandingReport:
        """Return the tenant's limits, rates and budgets, and their use."""
        return await self._transport.send(call("GET", path("tenants", tenant, "standing"), m.StandingReport))

    async def set_budget(
        self,
        tenant: str,
        period: Period,
        amount: int | Decimal | None,
        *,
        currency: str | None = None,
        key: str | None = None,
        project: str | None = None,
    ) -> m.StandingReport:
        """Give the tenant, one of its keys or one of its projects a budget in tokens, or in ``currency``; None: none."""
        told = str(amount) if currency is not None and amount is not None else amount
        body = {"amount": told, "key": key, "project": project, "currency": currency}
        return await self._transport.send(
            call("PUT", path("tenants", tenant, "budgets", period), m.StandingReport, body=body)
        )

    async def delete(
        self, tenant: str, *, grace_seconds: int | None = None, mode: SuspendMode = "blocked", reason: str = ""
    ) -> m.MarkedTenant:
        """Suspend the tenant, and have what it has removed once the grace time is over."""
        body = {"grace_seconds": grace_seconds, "mode": mode, "reason": reason}
        return await self._transport.send(call("PUT", path("tenants", tenant, "deletion"), m.MarkedTenant, body=body))

    async def restore(self, tenant: str) -> m.TenantBody:
        """Take back a deletion before its grace time is over."""
        return await self._transport.send(call("DELETE", path("tenants", tenant, "deletion"), m.TenantBody))

    async def _versioned(self, tenant: str) -> tuple[m.TenantBody, str]:
        return await self._transport.send_versioned(call("GET", path("tenants", tenant), m.TenantBody))


class AsyncTenantsKeys:
    """API keys of tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, tenant: str | None = None, prefix: str | None = None) -> AsyncIterator[m.OperatorsKeyBody]:
        """Yield keys, page by page: of the tenant of that id, or the one with that first part."""
        pages = listed("/keys", m.Page[m.OperatorsKeyBody], tenant_id=tenant, prefix=prefix)
        async for one in self._transport.every(pages):
            yield one

    async def create(
        self,
        tenant: str,
        *,
        note: str = "",
        role: Role = "member",
        scopes: Collection[str] | None = None,
        projects: Collection[str] | None = None,
        expires_at: datetime | None = None,
        base_models: Collection[str] | None = None,
        max_rank: int | None = None,
        networks: Collection[str] | None = None,
        limits: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> m.MadeKey:
        """Make a key of the tenant; its secret is in the answer only."""
        rights: dict[str, Any] = {"note": note, "role": role, "max_rank": max_rank}
        rights["expires_at"] = None if expires_at is None else expires_at.isoformat()
        lists = {"scopes": scopes, "projects": projects, "base_models": base_models, "networks": networks}
        rights |= {name: None if given is None else [*given] for name, given in lists.items()}
        rights["limits"] = None if limits is None else dict(limits)
        asked = call("POST", path("tenants", tenant, "keys"), m.MadeKey, body=rights, headers=once(idempotency_key))
        return await self._transport.send(asked)

    async def rotate(self, key: int, *, grace: int = 3600, idempotency_key: str | None = None) -> m.MadeKey:
        """Make a key with the same rights; the old one ends after ``grace`` seconds."""
        body, headers = {"grace_seconds": grace}, once(idempotency_key)
        asked = call("POST", path("keys", key, "rotation"), m.MadeKey, body=body, headers=headers)
        return await self._transport.send(asked)

    async def bound(self, key: int, limits: Mapping[str, int | None]) -> m.OperatorsKeyBody:
        """Give a key rates of its own, within its tenant's; None for none."""
        asked = call("PUT", path("keys", key, "limits"), m.OperatorsKeyBody, body={"limits": dict(limits)})
        return await self._transport.send(asked)

    async def revoke(self, key: int) -> None:
        """Revoke a key, and end its samples, at once."""
        await self._transport.send_only(call("DELETE", path("keys", key)))


class AsyncTenantsProjects:
    """Projects of tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, tenant: str) -> AsyncIterator[m.ProjectBody]:
        """Yield the tenant's projects."""
        async for one in self._transport.every(listed(path("tenants", tenant, "projects"), m.Page[m.ProjectBody])):
            yield one

    async def create(self, tenant: str, name: str) -> m.ProjectBody:
        """Make a project; one of that name is returned as it is."""
        asked = call("POST", path("tenants", tenant, "projects"), m.ProjectBody, body={"name": name})
        return await self._transport.send(asked)

    async def bound(self, tenant: str, project: str, limits: Mapping[str, int | None]) -> m.ProjectBody:
        """Give a project, by its id or name, limits within its tenant's; None for none."""
        asked, body = path("tenants", tenant, "projects", project, "limits"), {"limits": dict(limits)}
        return await self._transport.send(call("PUT", asked, m.ProjectBody, body=body))


def _prices(tenant: str | None) -> str:
    return "/prices" if tenant is None else path("tenants", tenant, "prices")


class AsyncPrices:
    """Prices of tokens and storage, which never change: a later one holds from its time on."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, tenant: str | None = None) -> AsyncIterator[m.PriceBody]:
        """Yield all prices of the service, or the tenant's own, which go before them."""
        async for one in self._transport.every(listed(_prices(tenant), m.Page[m.PriceBody])):
            yield one

    async def add(
        self,
        meter: PriceMeter,
        amount: Decimal,
        *,
        currency: str = "USD",
        base_model: str | None = None,
        valid_from: datetime | None = None,
        tenant: str | None = None,
    ) -> m.PriceBody:
        """Add the price of a million tokens or of a GB-month, from a time that is not over; with ``tenant`` its own."""
        start = None if valid_from is None else valid_from.isoformat()
        body = {"meter": meter, "amount": str(amount), "currency": currency, "base_model": base_model}
        asked = call("POST", _prices(tenant), m.PriceBody, body=body | {"valid_from": start}, headers=once(None))
        return await self._transport.send(asked)


class AsyncTenantsAlerts:
    """Alerts of tenants' budgets."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, tenant: str | None = None) -> AsyncIterator[m.AlertBody]:
        """Yield the alerts, the newest first: of every tenant, or of the one with that id."""
        async for one in self._transport.every(listed("/alerts", m.Page[m.AlertBody], tenant_id=tenant)):
            yield one


class AsyncTenantsUsage:
    """Usage of all tenants by day, and of each by the hour."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, *, days: int = 30, tenant: str | None = None) -> AsyncIterator[m.UsageDayBody]:
        """Yield the usage of the last days, or of the tenant of that name alone."""
        async for one in self._transport.every(listed("/usage", m.Page[m.UsageDayBody], days=days, tenant=tenant)):
            yield one

    async def of_tenant(
        self,
        tenant: str,
        *,
        since: datetime,
        before: datetime | None = None,
        group_by: Collection[Dimension] = (),
        bucket_width: BucketWidth = "1h",
    ) -> AsyncIterator[m.TenantUsageBody]:
        """Yield a tenant's usage of the hours from ``since`` on, up to its last answer, page by page."""
        window = {"since": since.isoformat(), "before": before and before.isoformat()}
        asked = window | {"group_by": [*group_by] or None, "bucket_width": bucket_width}
        below = path("tenants", tenant, "usage")
        async for one in self._transport.every(listed(below, m.Page[m.TenantUsageBody], **asked)):
            yield one

    async def export(
        self, tenant: str, *, since: datetime, before: datetime | None = None, format: UsageDocument = "focus"
    ) -> AsyncIterator[str]:
        """Yield the lines of FOCUS 1.2 CSV, or a CloudEvent a line, of the tenant's hours that change no more."""
        window = {"since": since.isoformat(), "before": before and before.isoformat()}
        asked: Call[Any] = call("GET", path("tenants", tenant, "usage", "export"), query=window | {"format": format})
        async for line in self._transport.lines(asked):
            yield line

    async def verify(self, day: date) -> m.UsageVerification:
        """Count a day's usage again."""
        return await self._transport.send(
            patient(call("GET", "/usage/verification", m.UsageVerification, query={"day": day.isoformat()}))
        )


class AsyncServiceAudit:
    """Audit log of the service and all tenants."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def entries(
        self,
        *,
        tenant: str | None = None,
        action: Collection[str] = (),
        resource: Collection[str] = (),
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[m.AuditEntryBody]:
        """Yield entries, newest first, page by page: of a tenant's id, of these actions or kinds of things, by this key."""
        times = {"since": since and since.isoformat(), "until": until and until.isoformat()}
        which = {"tenant": tenant, "key": key, "action": [*action] or None, "resource": [*resource] or None}
        async for one in self._transport.every(listed("/audit", m.Page[m.AuditEntryBody], **times, **which)):
            yield one

    async def verify(self) -> m.AuditVerification:
        """Have every day's digest computed again."""
        return await self._transport.send(patient(call("GET", "/audit/verification", m.AuditVerification)))


class AsyncWeftAdmin:
    """Client of a service's admin API, with an operator's key.

    ``base_url`` and ``api_key`` default to ``WEFT_ADMIN_URL`` and ``WEFT_ADMIN_KEY``. A request that failed for a while is sent
    again up to ``retries`` times. ``http`` stands in for a client of its own.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._transport = AsyncTransport(Endpoint.of_operator(base_url, api_key, timeout, retries), http)
        self.tenants = AsyncTenants(self._transport)
        self.keys = AsyncTenantsKeys(self._transport)
        self.projects = AsyncTenantsProjects(self._transport)
        self.webhooks = AsyncTenantsWebhooks(self._transport)
        self.prices = AsyncPrices(self._transport)
        self.usage = AsyncTenantsUsage(self._transport)
        self.alerts = AsyncTenantsAlerts(self._transport)
        self.audit = AsyncServiceAudit(self._transport)
        self.runs = AsyncAdminRuns(self._transport)
        self.sessions = AsyncAdminSessions(self._transport)
        self.operations = AsyncOperations(self._transport)
        self.checkpoints = AsyncAdminCheckpoints(self._transport)
        self.bases = AsyncBases(self._transport)
        self.gates = AsyncAdminGates(self._transport)
        self.replicas = AsyncReplicas(self._transport)
        self.trainers = AsyncTrainers(self._transport)
        self.pools = AsyncPools(self._transport)
        self.apis = AsyncApis(self._transport)
        self.ended_processes = AsyncEndedProcesses(self._transport)
        self.queue = AsyncQueue(self._transport)
        self.housekeeping = AsyncHousekeeping(self._transport)

    async def overview(self, *, window_seconds: int = 60) -> m.Overview:
        """Return the service at one glance: tenants, queue, processes."""
        query = {"window_seconds": window_seconds}
        return await self._transport.send(call("GET", "/overview", m.Overview, query=query))

    async def with_raw_response(
        self, method: Callable[P, Awaitable[R]], *args: P.args, **given: P.kwargs
    ) -> RawResponse[R]:
        """Call a method of this client, and return what it returns with the answer as it came: status, headers, body.

        Raises ``TypeError`` for a method that yields, such as a list or a stream.
        """
        with NotedResponses(method) as noted:
            parsed = await method(*args, **given)
        return RawResponse(parsed, noted.last)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
