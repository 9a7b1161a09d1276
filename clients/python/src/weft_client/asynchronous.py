"""The client with asyncio. ``weft_client.synchronous`` is made of this file (``clients/python/make_sync.py``)."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Self, TypeVar

import httpx

from weft_client import calls, models
from weft_client.calls import TINKER, Archive, Call
from weft_client.errors import BadRequest, WeftClientError
from weft_client.models import Record
from weft_client.streams import Event, StreamReader, sample_body
from weft_client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Endpoint, read, unreachable

R = TypeVar("R", bound=Record)
_PAGE = 1000


class AsyncTransport:
    """Sends calls over one pool of connections, and repeats those that may be repeated."""

    def __init__(self, endpoint: Endpoint, http: httpx.AsyncClient | None) -> None:
        self._endpoint = endpoint
        self._http = http or httpx.AsyncClient()

    async def send(self, call: Call[R]) -> R:
        """Return the record of the answer. Raises ``WeftClientError``."""
        answer = await self._answer(call)
        if answer is None:
            raise WeftClientError("the answer is empty", code="no_answer", status=204)
        return answer

    async def send_only(self, call: Call[Any]) -> None:
        """Send a call whose answer has no body. Raises ``WeftClientError``."""
        await self._answer(call)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Event]:
        """Yield the events of a stream; one that breaks off is begun again. Raises ``WeftClientError``."""
        call: Call[Record] = Call("POST", path, None, body=body)
        reader, attempt = StreamReader(), 0
        while not reader.is_done:
            try:
                request = self._endpoint.request(call)
                async with self._http.stream(**request) as response:
                    if not response.is_success:
                        await response.aread()
                        read(call, response)
                    async for line in response.aiter_lines():
                        for event in reader.events(line):
                            attempt = 0
                            yield event
                if reader.is_done:
                    return
                failure: WeftClientError = unreachable(httpx.ReadError("the stream ended early"))
            except httpx.TransportError as error:
                failure = unreachable(error)
            except WeftClientError as error:
                failure = error
            await asyncio.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _answer(self, call: Call[R]) -> R | None:
        attempt = 0
        while True:
            try:
                return read(call, await self._http.request(**self._endpoint.request(call)))
            except httpx.TransportError as error:
                failure: WeftClientError = unreachable(error)
            except WeftClientError as error:
                failure = error
            await asyncio.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1


class AsyncRuns:
    """Curves of runs."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def points(self, run: str, *, after: int = 0, limit: int = 500) -> models.Points:
        """Return the run's points after step ``after``, at most ``limit``."""
        return await self._transport.send(calls.points(run, after=after, limit=limit))

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


class AsyncGates:
    """Gates of adapters: pause, resume, and the version that live samplers follow."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def state(self, run: str) -> models.GateState:
        """Describe the gate of the run's adapter."""
        return await self._transport.send(calls.gate(run))

    async def pause(
        self,
        run: str,
        *,
        mode: models.GateMode = "keep",
        reason: str | None = None,
        ttl: float | None = None,
        wait_seconds: float = 30.0,
        clear_cache: bool = False,
    ) -> models.GateState:
        """Pause sampling from the adapter, for ``ttl`` seconds at most; wait up to ``wait_seconds`` for it to hold."""
        return await self._transport.send(
            calls.pause(run, mode=mode, reason=reason, ttl=ttl, wait_seconds=wait_seconds, clear_cache=clear_cache)
        )

    async def resume(self, run: str, *, generation: int | None = None) -> models.GateState:
        """End a pause; with ``generation`` only that one, not a later one of somebody else."""
        return await self._transport.send(calls.resume(run, generation=generation))

    @asynccontextmanager
    async def paused(
        self, run: str, *, mode: models.GateMode = "keep", reason: str | None = None, ttl: float | None = None
    ) -> AsyncIterator[models.GateState]:
        """Pause the adapter within the block. At its end, after an error too, this pause ends; one of somebody else goes on."""
        state = await self.pause(run, mode=mode, reason=reason, ttl=ttl)
        try:
            yield state
        finally:
            await self._end(run, state.generation)

    async def _end(self, run: str, generation: int) -> None:
        try:
            await self.resume(run, generation=generation)
        except BadRequest:
            if (await self.state(run)).generation == generation:
                raise

    async def reload(self, run: str, *, path: str | None = None) -> models.Reloaded:
        """Have live samplers of the run follow the checkpoint ``path``, by default the newest."""
        return await self._transport.send(calls.reload(run, path=path))


class AsyncSamples:
    """Samples: streams, reports, and how old a live sampler's may become."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def stream(
        self,
        sampler: str,
        prompt: list[int],
        *,
        seq_id: int,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        stop: list[int] | None = None,
    ) -> AsyncIterator[Event]:
        """Draw a sample and yield its tokens as they are made, then all of it.

        ``sampler`` is a sampling session's id, and ``seq_id`` a number that none of its samples had. A stream that breaks
        off goes on with the next token. Raises ``WeftClientError``.
        """
        body = sample_body(
            sampler,
            prompt,
            seq_id=seq_id,
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
        )
        async for event in self._transport.stream(f"{TINKER}/stream_sample", body):
            yield event

    async def report(self, request: str) -> models.SampleInfo:
        """Report on a finished sample: the weights that made each token, the replicas, the time."""
        return await self._transport.send(calls.report(request))

    async def staleness(self, sampler: str) -> models.StalenessInfo:
        """Describe how far a live sampler's samples may fall behind."""
        return await self._transport.send(calls.staleness(sampler))

    async def bound_staleness(
        self, sampler: str, *, max_version_lag: int | None, on_stale: models.OnStale = "fail"
    ) -> models.StalenessInfo:
        """Set how far a live sampler's samples may fall behind; None lifts the bound."""
        return await self._transport.send(
            calls.bound_staleness(sampler, max_version_lag=max_version_lag, on_stale=on_stale)
        )


class AsyncUsage:
    """Usage and limits of the tenant."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def query(
        self,
        *,
        since: datetime,
        before: datetime | None = None,
        group_by: Collection[models.Dimension] = (),
        bucket_width: models.BucketWidth = "1h",
    ) -> AsyncIterator[models.UsageInfo]:
        """Yield the usage of the hours from ``since`` on, page by page. Both times have a zone."""
        offset: int | None = 0
        while offset is not None:
            page = await self._transport.send(
                calls.usage(
                    since=since,
                    before=before,
                    group_by=group_by,
                    bucket_width=bucket_width,
                    limit=_PAGE,
                    offset=offset,
                )
            )
            for line in page.lines:
                yield line
            offset = page.next_offset

    async def standing(self) -> models.StandingReport:
        """Return the tenant's limits and their use."""
        return await self._transport.send(calls.standing())


class AsyncKeys:
    """API keys of the tenant."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> models.KeyList:
        """List the keys, ended ones too."""
        return await self._transport.send(calls.keys())

    async def create(
        self,
        *,
        note: str = "",
        role: models.Role = "member",
        scopes: Collection[str] | None = None,
        projects: Collection[str] | None = None,
        expires_at: datetime | None = None,
        base_models: Collection[str] | None = None,
        max_rank: int | None = None,
        networks: Collection[str] | None = None,
        idempotency_key: str | None = None,
    ) -> models.MadeKey:
        """Make a key; its secret is in the answer only. The right to each bound is the caller's own."""
        rights: dict[str, Any] = {"note": note, "role": role, "expires_at": expires_at, "max_rank": max_rank}
        lists = {"scopes": scopes, "projects": projects, "base_models": base_models, "networks": networks}
        rights |= {name: None if given is None else [*given] for name, given in lists.items()}
        return await self._transport.send(calls.make_key(rights, idempotency_key=idempotency_key))

    async def rotate(self, key: int, *, grace: int = 3600, idempotency_key: str | None = None) -> models.MadeKey:
        """Make a key with the same rights; the old one ends after ``grace`` seconds."""
        return await self._transport.send(calls.rotate_key(key, grace=grace, idempotency_key=idempotency_key))

    async def revoke(self, key: int) -> None:
        """Revoke a key, and end its samples, at once."""
        await self._transport.send_only(calls.revoke_key(key))


class AsyncProjects:
    """Projects of the tenant."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> models.ProjectList:
        """List the projects that the key reaches."""
        return await self._transport.send(calls.projects())

    async def create(self, name: str) -> models.ProjectBody:
        """Make a project; one of that name is returned as it is."""
        return await self._transport.send(calls.make_project(name))


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
        idempotency_key: str | None = None,
    ) -> models.JobInfo:
        """Send a tar of PEFT's adapter files, and begin to take it in. Bytes are sent again after an outage, a stream is not."""
        return await self._transport.send(
            calls.import_archive(
                archive,
                base_model=base_model,
                name=name,
                segment=segment,
                ttl_seconds=ttl_seconds,
                idempotency_key=idempotency_key,
            )
        )

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
        self._transport = AsyncTransport(Endpoint(base_url, api_key, timeout, retries), http)
        self.runs = AsyncRuns(self._transport)
        self.gates = AsyncGates(self._transport)
        self.samples = AsyncSamples(self._transport)
        self.usage = AsyncUsage(self._transport)
        self.keys = AsyncKeys(self._transport)
        self.projects = AsyncProjects(self._transport)
        self.jobs = AsyncJobs(self._transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
