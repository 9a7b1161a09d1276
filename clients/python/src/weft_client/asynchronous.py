"""The client with asyncio. ``weft_client.synchronous`` is made of this file (``clients/python/make_sync.py``)."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from weft_client import calls
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.call import Archive
from weft_client.raw_responses import NotedResponses, RawResponse
from weft_client.sampling_async import AsyncClientExceptions, AsyncGates, AsyncOperations, AsyncSamples
from weft_client.tenancy_async import AsyncAudit, AsyncKeys, AsyncProjects, AsyncUsage
from weft_client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Endpoint
from weft_client.transport_async import AsyncTransport
from weft_client.webhooks_async import AsyncWebhooks

if TYPE_CHECKING:
    import httpx

    from weft_client import models

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000


class AsyncRuns:
    """Runs, and their curves."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def page(
        self,
        *,
        project_id: str | None = None,
        base_model: str | None = None,
        state: models.ListedState | None = None,
        text: str | None = None,
        metadata: str | None = None,
        recent: int = 0,
        limit: int = 50,
        cursor: str | None = None,
    ) -> models.RunList:
        """Return a page of runs, latest first. ``metadata`` is one entry, as ``name=value``."""
        which: dict[models.RunFilter, str | None] = {"project_id": project_id, "base_model": base_model, "state": state}
        which |= {"text": text, "metadata": metadata}
        return await self._transport.send(calls.runs(which, recent=recent, limit=limit, cursor=cursor))

    async def list(
        self,
        *,
        project_id: str | None = None,
        base_model: str | None = None,
        state: models.ListedState | None = None,
        text: str | None = None,
        metadata: str | None = None,
        recent: int = 0,
    ) -> AsyncIterator[models.RunInfo]:
        """Yield runs, latest first, page by page. ``metadata`` is one entry, as ``name=value``."""
        cursor: str | None = None
        while True:
            page = await self.page(
                project_id=project_id,
                base_model=base_model,
                state=state,
                text=text,
                metadata=metadata,
                recent=recent,
                cursor=cursor,
            )
            for run in page.runs:
                yield run
            if (cursor := page.next_cursor) is None:
                return

    async def get(self, run: str, *, recent: int = 0) -> models.RunInfo:
        """Describe the run, with the mean losses of its last ``recent`` steps."""
        return await self._transport.send(calls.run(run, recent=recent))

    async def weigh(self, run: str, weight: float) -> models.RunWeight:
        """Give the run a weight among the tenant's runs; one of weight 3 is served three times as much as one of 1."""
        return await self._transport.send(calls.weigh_run(run, weight))

    async def marks(self, run: str) -> builtins.list[models.MarkInfo]:
        """Return what happened to the run beside its steps: saves, versions, its trainers, pauses."""
        return (await self._transport.send(calls.marks(run))).marks

    async def points(self, run: str, *, after: int = 0, limit: int = 500) -> models.Points:
        """Return the run's points after step ``after``, at most ``limit``."""
        return await self._transport.send(calls.points(run, after=after, limit=limit))

    async def waiting(self, run: str) -> models.WaitingInfo:
        """Tell why the run's next operation has not ended, behind what it waits, and for how long at most."""
        return await self._transport.send(calls.waiting(run))

    async def follow(self, run: str, *, after: int = 0, every: float = 1.0) -> AsyncIterator[models.PointInfo]:
        """Yield each point after step ``after`` once, as it comes, for ever; look every ``every`` seconds."""
        while True:
            found = await self.points(run, after=after, limit=_PAGE)
            for point in found.points:
                after = point.step
                yield point
            if len(found.points) < _PAGE:
                await asyncio.sleep(every)

    async def add_metrics(self, run: str, values: Mapping[int, Mapping[str, float | None]]) -> models.Recorded:
        """Record metrics by step and name; a value that is there is replaced."""
        return await self._transport.send(calls.add_metrics(run, values))

    async def metric(self, run: str, name: str, *, after: int = -1, limit: int = 500) -> models.MetricValues:
        """Return the values of a metric at steps after ``after``."""
        return await self._transport.send(calls.metric(run, name, after=after, limit=limit))


class AsyncCheckpoints:
    """Checkpoints of the tenant, many at once; the SDK does the rest."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        run: str | None = None,
        type: models.CheckpointType | None = None,
        name: str | None = None,
        public: bool | None = None,
        expires_within: int | None = None,
    ) -> AsyncIterator[models.KeptCheckpoint]:
        """Yield checkpoints, newest first, page by page: those that are so, and expire within so many seconds."""
        cursor: str | None = None
        offset = 0
        while True:
            page = await self._transport.send(
                calls.checkpoints(
                    run=run,
                    type=type,
                    name=name,
                    public=public,
                    expires_within=expires_within,
                    limit=_PAGE,
                    cursor=cursor,
                    offset=None if cursor else offset,
                )
            )
            for checkpoint in page.checkpoints:
                yield checkpoint
            offset += _PAGE
            # Services of before the cursor tell the number alone.
            if page.next_cursor is None and (cursor is not None or offset >= page.cursor.total_count):
                return
            cursor = page.next_cursor

    async def delete(self, paths: Collection[str]) -> models.DeletedCheckpoints:
        """Delete up to 1,000 checkpoints, and tell at which paths there was none."""
        return await self._transport.send(calls.delete_checkpoints(paths))


class AsyncJobs:
    """Jobs on weights: merges and imports."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def merge(
        self,
        path: str,
        name: str,
        *,
        ttl_seconds: int | None = None,
        dtype: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.JobInfo:
        """Begin to merge the checkpoint ``path`` into its base, as external weights ``name`` of its run."""
        return await self._transport.send(
            calls.merge(path, name, ttl_seconds=ttl_seconds, dtype=dtype, idempotency_key=idempotency_key)
        )

    async def import_archive(
        self,
        archive: Archive,
        *,
        base_model: str,
        name: str,
        segment: str | None = None,
        ttl_seconds: int | None = None,
        project: str | None = None,
        offset: int = 0,
        idempotency_key: str | None = None,
    ) -> models.JobInfo:
        """Send a tar of PEFT's adapter files, and begin to take it in. Bytes are sent again after an outage, a stream is not.

        With ``offset``, ``archive`` is what comes after so many bytes of an upload that broke off (``received``).
        It is sent once: after an outage the service may have more of it.
        """
        return await self._transport.send(
            calls.import_archive(
                archive,
                base_model=base_model,
                name=name,
                segment=segment,
                ttl_seconds=ttl_seconds,
                project=project,
                offset=offset,
                idempotency_key=idempotency_key,
            )
        )

    async def received(self, idempotency_key: str) -> models.ReceivedBytes:
        """Tell how much has come of an archive that was sent under this key, and whose upload broke off."""
        return await self._transport.send(calls.received(idempotency_key))

    async def list(self, *, limit: int = 100) -> models.JobList:
        """List the jobs, newest first."""
        return await self._transport.send(calls.jobs(limit=limit))

    async def get(self, job: str) -> models.JobInfo:
        """Describe a job."""
        return await self._transport.send(calls.job(job))

    async def wait(self, job: str, *, every: float = 1.0) -> models.JobInfo:
        """Return the job once it has ended, in whatever way; look every ``every`` seconds."""
        while (found := await self.get(job)).finished_at is None:
            await asyncio.sleep(every)
        return found

    async def cancel(self, job: str) -> models.JobInfo:
        """Cancel a job; a finished one stays as it is."""
        return await self._transport.send(calls.cancel_job(job))


class AsyncWeft:
    """Client of one service, with one key.

    ``base_url`` and ``api_key`` default to ``TINKER_BASE_URL`` and ``TINKER_API_KEY``, the key also to that of ``tinker auth
    login``. A request that failed for a while is sent again up to ``retries`` times. ``http`` stands in for a client of its own.
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
        self._transport = AsyncTransport(Endpoint.of_tenant(base_url, api_key, timeout, retries), http)
        self.runs = AsyncRuns(self._transport)
        self.gates = AsyncGates(self._transport)
        self.samples = AsyncSamples(self._transport)
        self.operations = AsyncOperations(self._transport)
        self.exceptions = AsyncClientExceptions(self._transport)
        self.usage = AsyncUsage(self._transport)
        self.audit = AsyncAudit(self._transport)
        self.keys = AsyncKeys(self._transport)
        self.projects = AsyncProjects(self._transport)
        self.webhooks = AsyncWebhooks(self._transport)
        self.checkpoints = AsyncCheckpoints(self._transport)
        self.jobs = AsyncJobs(self._transport)
        self._admin: AsyncWeftAdmin | None = None

    @property
    def base_url(self) -> str:
        """Address of the service."""
        return self._transport.base_url

    @property
    def admin(self) -> AsyncWeftAdmin:
        """The admin API at ``WEFT_ADMIN_URL``, with the operator's key ``WEFT_ADMIN_KEY``. Raises ``ValueError`` without them."""
        if self._admin is None:
            self._admin = AsyncWeftAdmin()
        return self._admin

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
        if self._admin is not None:
            await self._admin.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
