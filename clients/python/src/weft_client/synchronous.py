"""The client without asyncio.

``clients/python/make_sync.py`` makes this file of ``weft_client.asynchronous``.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from weft_client import calls
from weft_client.admin_sync import WeftAdmin
from weft_client.call import Archive
from weft_client.raw_responses import NotedResponses, RawResponse
from weft_client.sampling_sync import ClientExceptions, Gates, Operations, Samples
from weft_client.tenancy_sync import Audit, Keys, Projects, Usage
from weft_client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Endpoint
from weft_client.transport_sync import Transport
from weft_client.webhooks_sync import Webhooks

if TYPE_CHECKING:
    import httpx

    from weft_client import models

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000


class Runs:
    """Runs, and their curves."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def page(
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
        return self._transport.send(calls.runs(which, recent=recent, limit=limit, cursor=cursor))

    def list(
        self,
        *,
        project_id: str | None = None,
        base_model: str | None = None,
        state: models.ListedState | None = None,
        text: str | None = None,
        metadata: str | None = None,
        recent: int = 0,
    ) -> Iterator[models.RunInfo]:
        """Yield runs, latest first, page by page. ``metadata`` is one entry, as ``name=value``."""
        cursor: str | None = None
        while True:
            page = self.page(
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

    def get(self, run: str, *, recent: int = 0) -> models.RunInfo:
        """Describe the run, with the mean losses of its last ``recent`` steps."""
        return self._transport.send(calls.run(run, recent=recent))

    def weigh(self, run: str, weight: float) -> models.RunWeight:
        """Give the run a weight among the tenant's runs; one of weight 3 is served three times as much as one of 1."""
        return self._transport.send(calls.weigh_run(run, weight))

    def marks(self, run: str) -> builtins.list[models.MarkInfo]:
        """Return what happened to the run beside its steps: saves, versions, its trainers, pauses."""
        return (self._transport.send(calls.marks(run))).marks

    def points(self, run: str, *, after: int = 0, limit: int = 500) -> models.Points:
        """Return the run's points after step ``after``, at most ``limit``."""
        return self._transport.send(calls.points(run, after=after, limit=limit))

    def waiting(self, run: str) -> models.WaitingInfo:
        """Tell why the run's next operation has not ended, behind what it waits, and for how long at most."""
        return self._transport.send(calls.waiting(run))

    def follow(self, run: str, *, after: int = 0, every: float = 1.0) -> Iterator[models.PointInfo]:
        """Yield each point after step ``after`` once, as it comes, for ever; look every ``every`` seconds."""
        while True:
            found = self.points(run, after=after, limit=_PAGE)
            for point in found.points:
                after = point.step
                yield point
            if len(found.points) < _PAGE:
                time.sleep(every)

    def add_metrics(self, run: str, values: Mapping[int, Mapping[str, float | None]]) -> models.Recorded:
        """Record metrics by step and name; a value that is there is replaced."""
        return self._transport.send(calls.add_metrics(run, values))

    def metric(self, run: str, name: str, *, after: int = -1, limit: int = 500) -> models.MetricValues:
        """Return the values of a metric at steps after ``after``."""
        return self._transport.send(calls.metric(run, name, after=after, limit=limit))


class Checkpoints:
    """Checkpoints of the tenant, many at once; the SDK does the rest."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        run: str | None = None,
        type: models.CheckpointType | None = None,
        name: str | None = None,
        public: bool | None = None,
        expires_within: int | None = None,
    ) -> Iterator[models.KeptCheckpoint]:
        """Yield checkpoints, newest first, page by page: those that are so, and expire within so many seconds."""
        cursor: str | None = None
        offset = 0
        while True:
            page = self._transport.send(
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

    def delete(self, paths: Collection[str]) -> models.DeletedCheckpoints:
        """Delete up to 1,000 checkpoints, and tell at which paths there was none."""
        return self._transport.send(calls.delete_checkpoints(paths))


class Jobs:
    """Jobs on weights: merges and imports."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def merge(
        self,
        path: str,
        name: str,
        *,
        ttl_seconds: int | None = None,
        dtype: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.JobInfo:
        """Begin to merge the checkpoint ``path`` into its base, as external weights ``name`` of its run."""
        return self._transport.send(
            calls.merge(path, name, ttl_seconds=ttl_seconds, dtype=dtype, idempotency_key=idempotency_key)
        )

    def import_archive(
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
        return self._transport.send(
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

    def received(self, idempotency_key: str) -> models.ReceivedBytes:
        """Tell how much has come of an archive that was sent under this key, and whose upload broke off."""
        return self._transport.send(calls.received(idempotency_key))

    def list(self, *, limit: int = 100) -> models.JobList:
        """List the jobs, newest first."""
        return self._transport.send(calls.jobs(limit=limit))

    def get(self, job: str) -> models.JobInfo:
        """Describe a job."""
        return self._transport.send(calls.job(job))

    def wait(self, job: str, *, every: float = 1.0) -> models.JobInfo:
        """Return the job once it has ended, in whatever way; look every ``every`` seconds."""
        while (found := self.get(job)).finished_at is None:
            time.sleep(every)
        return found

    def cancel(self, job: str) -> models.JobInfo:
        """Cancel a job; a finished one stays as it is."""
        return self._transport.send(calls.cancel_job(job))


class Weft:
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
        http: httpx.Client | None = None,
    ) -> None:
        self._transport = Transport(Endpoint.of_tenant(base_url, api_key, timeout, retries), http)
        self.runs = Runs(self._transport)
        self.gates = Gates(self._transport)
        self.samples = Samples(self._transport)
        self.operations = Operations(self._transport)
        self.exceptions = ClientExceptions(self._transport)
        self.usage = Usage(self._transport)
        self.audit = Audit(self._transport)
        self.keys = Keys(self._transport)
        self.projects = Projects(self._transport)
        self.webhooks = Webhooks(self._transport)
        self.checkpoints = Checkpoints(self._transport)
        self.jobs = Jobs(self._transport)
        self._admin: WeftAdmin | None = None

    @property
    def base_url(self) -> str:
        """Address of the service."""
        return self._transport.base_url

    @property
    def admin(self) -> WeftAdmin:
        """The admin API at ``WEFT_ADMIN_URL``, with the operator's key ``WEFT_ADMIN_KEY``. Raises ``ValueError`` without them."""
        if self._admin is None:
            self._admin = WeftAdmin()
        return self._admin

    def with_raw_response(self, method: Callable[P, R], *args: P.args, **given: P.kwargs) -> RawResponse[R]:
        """Call a method of this client, and return what it returns with the answer as it came: status, headers, body.

        Raises ``TypeError`` for a method that yields, such as a list or a stream.
        """
        with NotedResponses(method) as noted:
            parsed = method(*args, **given)
        return RawResponse(parsed, noted.last)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()
        if self._admin is not None:
            self._admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
