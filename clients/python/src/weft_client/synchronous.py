"""The client without asyncio. ``clients/python/make_sync.py`` makes it of ``weft_client.asynchronous``."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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


class Transport:
    """Sends calls over one pool of connections, and repeats those that may be repeated."""

    def __init__(self, endpoint: Endpoint, http: httpx.Client | None) -> None:
        self._endpoint = endpoint
        self._http = http or httpx.Client()

    def send(self, call: Call[R]) -> R:
        """Return the record of the answer. Raises ``WeftClientError``."""
        answer = self._answer(call)
        if answer is None:
            raise WeftClientError("the answer is empty", code="no_answer", status=204)
        return answer

    def send_only(self, call: Call[Any]) -> None:
        """Send a call whose answer has no body. Raises ``WeftClientError``."""
        self._answer(call)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a stream; one that breaks off is begun again. Raises ``WeftClientError``."""
        call: Call[Record] = Call("POST", path, None, body=body)
        reader, attempt = StreamReader(), 0
        while not reader.is_done:
            try:
                request = self._endpoint.request(call)
                with self._http.stream(**request) as response:
                    if not response.is_success:
                        response.read()
                        read(call, response)
                    for line in response.iter_lines():
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
            time.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _answer(self, call: Call[R]) -> R | None:
        attempt = 0
        while True:
            try:
                return read(call, self._http.request(**self._endpoint.request(call)))
            except httpx.TransportError as error:
                failure: WeftClientError = unreachable(error)
            except WeftClientError as error:
                failure = error
            time.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1


class Runs:
    """Curves of runs."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def points(self, run: str, *, after: int = 0, limit: int = 500) -> models.Points:
        """Return the run's points after step ``after``, at most ``limit``."""
        return self._transport.send(calls.points(run, after=after, limit=limit))

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


class Gates:
    """Gates of adapters: pause, resume, and the version that live samplers follow."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def state(self, run: str) -> models.GateState:
        """Describe the gate of the run's adapter."""
        return self._transport.send(calls.gate(run))

    def pause(
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
        return self._transport.send(
            calls.pause(run, mode=mode, reason=reason, ttl=ttl, wait_seconds=wait_seconds, clear_cache=clear_cache)
        )

    def resume(self, run: str, *, generation: int | None = None) -> models.GateState:
        """End a pause; with ``generation`` only that one, not a later one of somebody else."""
        return self._transport.send(calls.resume(run, generation=generation))

    @contextmanager
    def paused(
        self, run: str, *, mode: models.GateMode = "keep", reason: str | None = None, ttl: float | None = None
    ) -> Iterator[models.GateState]:
        """Pause the adapter within the block. At its end, after an error too, this pause ends; one of somebody else goes on."""
        state = self.pause(run, mode=mode, reason=reason, ttl=ttl)
        try:
            yield state
        finally:
            self._end(run, state.generation)

    def _end(self, run: str, generation: int) -> None:
        try:
            self.resume(run, generation=generation)
        except BadRequest:
            if (self.state(run)).generation == generation:
                raise

    def reload(self, run: str, *, path: str | None = None) -> models.Reloaded:
        """Have live samplers of the run follow the checkpoint ``path``, by default the newest."""
        return self._transport.send(calls.reload(run, path=path))


class Samples:
    """Samples: streams, reports, and how old a live sampler's may become."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def stream(
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
    ) -> Iterator[Event]:
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
        for event in self._transport.stream(f"{TINKER}/stream_sample", body):
            yield event

    def report(self, request: str) -> models.SampleInfo:
        """Report on a finished sample: the weights that made each token, the replicas, the time."""
        return self._transport.send(calls.report(request))

    def staleness(self, sampler: str) -> models.StalenessInfo:
        """Describe how far a live sampler's samples may fall behind."""
        return self._transport.send(calls.staleness(sampler))

    def bound_staleness(
        self, sampler: str, *, max_version_lag: int | None, on_stale: models.OnStale = "fail"
    ) -> models.StalenessInfo:
        """Set how far a live sampler's samples may fall behind; None lifts the bound."""
        return self._transport.send(calls.bound_staleness(sampler, max_version_lag=max_version_lag, on_stale=on_stale))


class Usage:
    """Usage and limits of the tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def query(
        self,
        *,
        since: datetime,
        before: datetime | None = None,
        group_by: Collection[models.Dimension] = (),
        bucket_width: models.BucketWidth = "1h",
    ) -> Iterator[models.UsageInfo]:
        """Yield the usage of the hours from ``since`` on, page by page. Both times have a zone."""
        offset: int | None = 0
        while offset is not None:
            page = self._transport.send(
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

    def standing(self) -> models.StandingReport:
        """Return the tenant's limits and their use."""
        return self._transport.send(calls.standing())


class Keys:
    """API keys of the tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> models.KeyList:
        """List the keys, ended ones too."""
        return self._transport.send(calls.keys())

    def create(
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
        return self._transport.send(calls.make_key(rights, idempotency_key=idempotency_key))

    def rotate(self, key: int, *, grace: int = 3600, idempotency_key: str | None = None) -> models.MadeKey:
        """Make a key with the same rights; the old one ends after ``grace`` seconds."""
        return self._transport.send(calls.rotate_key(key, grace=grace, idempotency_key=idempotency_key))

    def revoke(self, key: int) -> None:
        """Revoke a key, and end its samples, at once."""
        self._transport.send_only(calls.revoke_key(key))


class Projects:
    """Projects of the tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> models.ProjectList:
        """List the projects that the key reaches."""
        return self._transport.send(calls.projects())

    def create(self, name: str) -> models.ProjectBody:
        """Make a project; one of that name is returned as it is."""
        return self._transport.send(calls.make_project(name))


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
        idempotency_key: str | None = None,
    ) -> models.JobInfo:
        """Send a tar of PEFT's adapter files, and begin to take it in. Bytes are sent again after an outage, a stream is not."""
        return self._transport.send(
            calls.import_archive(
                archive,
                base_model=base_model,
                name=name,
                segment=segment,
                ttl_seconds=ttl_seconds,
                idempotency_key=idempotency_key,
            )
        )

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
        self._transport = Transport(Endpoint(base_url, api_key, timeout, retries), http)
        self.runs = Runs(self._transport)
        self.gates = Gates(self._transport)
        self.samples = Samples(self._transport)
        self.usage = Usage(self._transport)
        self.keys = Keys(self._transport)
        self.projects = Projects(self._transport)
        self.jobs = Jobs(self._transport)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
