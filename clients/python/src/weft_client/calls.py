"""Requests of the client, each made by one function. What sends them is ``weft_client.transport``.

Every request may be sent again: it reads, it sets a state, or it has an ``Idempotency-Key``.
"""

from collections.abc import AsyncIterable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

from weft_client import models as m

TINKER, WEFT = "/api/v1", "/api/weft/v1"

R = TypeVar("R", bound=m.Record)
Archive = bytes | Iterable[bytes] | AsyncIterable[bytes]


@dataclass(frozen=True)
class Call(Generic[R]):
    """One request, and the record that its answer is read as; None for an answer without a body."""

    method: str
    path: str
    answer: type[R] | None
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: Archive | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    """Time that the service may take beyond the client's timeout."""

    @property
    def is_repeatable(self) -> bool:
        """True if the request can be sent again; a body that streams cannot."""
        return self.content is None or isinstance(self.content, bytes)


def points(run: str, *, after: int, limit: int) -> Call[m.Points]:
    """Read a run's points after step ``after``."""
    return Call("GET", f"{WEFT}/runs/{_id(run)}/points", m.Points, {"after": after, "limit": limit})


def add_metrics(run: str, values: Mapping[int, Mapping[str, float | None]]) -> Call[m.Recorded]:
    """Record metrics by step and name."""
    body = {"points": [{"step": step, "metrics": dict(named)} for step, named in values.items()]}
    return Call("POST", f"{WEFT}/runs/{_id(run)}/points", m.Recorded, body=body)


def metric(run: str, name: str, *, after: int, limit: int) -> Call[m.MetricValues]:
    """Read one metric of a run."""
    query = {"name": name, "after": after, "limit": limit}
    return Call("GET", f"{WEFT}/runs/{_id(run)}/metrics", m.MetricValues, query)


def gate(run: str) -> Call[m.GateState]:
    """Describe an adapter's gate."""
    return Call("GET", f"{TINKER}/adapters/{_id(run)}", m.GateState)


def pause(
    run: str,
    *,
    mode: m.GateMode,
    reason: str | None,
    ttl: float | None,
    wait_seconds: float,
    clear_cache: bool,
) -> Call[m.GateState]:
    """Pause an adapter; the answer comes once nothing is in flight, or after ``wait_seconds``."""
    body = {
        "mode": mode,
        "reason": reason,
        "ttl_seconds": ttl,
        "timeout_seconds": wait_seconds,
        "clear_cache": clear_cache,
    }
    return Call("POST", f"{TINKER}/adapters/{_id(run)}/pause", m.GateState, body=body, seconds=wait_seconds)


def resume(run: str, *, generation: int | None) -> Call[m.GateState]:
    """End a pause; with ``generation`` only that one."""
    return Call("POST", f"{TINKER}/adapters/{_id(run)}/resume", m.GateState, body={"generation": generation})


def reload(run: str, *, path: str | None) -> Call[m.Reloaded]:
    """Have live samplers follow a version, the newest by default."""
    return Call("POST", f"{TINKER}/adapters/{_id(run)}/reload", m.Reloaded, body={"path": path})


def staleness(sampler: str) -> Call[m.StalenessInfo]:
    """Describe a live sampler's bound."""
    return Call("GET", f"{TINKER}/samplers/{_id(sampler)}/staleness", m.StalenessInfo)


def bound_staleness(sampler: str, *, max_version_lag: int | None, on_stale: m.OnStale) -> Call[m.StalenessInfo]:
    """Set a live sampler's bound."""
    body = {"max_version_lag": max_version_lag, "on_stale": on_stale}
    return Call("POST", f"{TINKER}/samplers/{_id(sampler)}/staleness", m.StalenessInfo, body=body)


def report(request: str) -> Call[m.SampleInfo]:
    """Report on a finished sample."""
    return Call("GET", f"{TINKER}/samples/{_id(request)}", m.SampleInfo)


def usage(
    *,
    since: datetime,
    before: datetime | None,
    group_by: Collection[m.Dimension],
    bucket_width: m.BucketWidth,
    limit: int,
    offset: int,
) -> Call[m.Usage]:
    """Read a page of usage."""
    query: dict[str, Any] = {
        "since": since.isoformat(),
        "group_by": list(group_by),
        "bucket_width": bucket_width,
        "limit": limit,
        "offset": offset,
    }
    if before is not None:
        query["before"] = before.isoformat()
    return Call("GET", f"{WEFT}/usage", m.Usage, query)


def standing() -> Call[m.StandingReport]:
    """Read the limits and their use."""
    return Call("GET", f"{WEFT}/usage/standing", m.StandingReport)


def keys() -> Call[m.KeyList]:
    """List the tenant's keys."""
    return Call("GET", f"{WEFT}/keys", m.KeyList)


def make_key(rights: Mapping[str, Any], *, idempotency_key: str | None) -> Call[m.MadeKey]:
    """Make a key."""
    body = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in rights.items()}
    return Call("POST", f"{WEFT}/keys", m.MadeKey, body=body, headers=_once(idempotency_key))


def rotate_key(key: int, *, grace: int, idempotency_key: str | None) -> Call[m.MadeKey]:
    """Make a key with the same rights; the old one ends after ``grace`` seconds."""
    path = f"{WEFT}/keys/{key}/rotate"
    return Call("POST", path, m.MadeKey, body={"grace_seconds": grace}, headers=_once(idempotency_key))


def revoke_key(key: int) -> Call[m.KeyList]:
    """Revoke a key at once."""
    return Call("DELETE", f"{WEFT}/keys/{key}", None)


def projects() -> Call[m.ProjectList]:
    """List the projects that the key reaches."""
    return Call("GET", f"{WEFT}/projects", m.ProjectList)


def make_project(name: str) -> Call[m.ProjectBody]:
    """Make a project; a repeat finds the first one."""
    return Call("POST", f"{WEFT}/projects", m.ProjectBody, body={"name": name})


def merge(
    path: str, name: str, *, ttl_seconds: int | None, dtype: str | None, idempotency_key: str | None
) -> Call[m.JobInfo]:
    """Have a checkpoint merged into its base."""
    body = {"path": path, "name": name, "ttl_seconds": ttl_seconds, "dtype": dtype}
    return Call("POST", f"{WEFT}/merges", m.JobInfo, body=body, headers=_once(idempotency_key))


def import_archive(
    archive: Archive,
    *,
    base_model: str,
    name: str,
    segment: str | None,
    ttl_seconds: int | None,
    idempotency_key: str | None,
) -> Call[m.JobInfo]:
    """Have a tar of PEFT's adapter files taken in as a checkpoint."""
    query = {"base_model": base_model, "name": name, "segment": segment, "ttl_seconds": ttl_seconds}
    given = {key: value for key, value in query.items() if value is not None}
    headers = {"Content-Type": "application/x-tar", **_once(idempotency_key)}
    return Call("POST", f"{WEFT}/imports", m.JobInfo, given, content=archive, headers=headers)


def jobs(*, limit: int) -> Call[m.JobList]:
    """List jobs, newest first."""
    return Call("GET", f"{WEFT}/jobs", m.JobList, {"limit": limit})


def job(id: str) -> Call[m.JobInfo]:
    """Describe a job."""
    return Call("GET", f"{WEFT}/jobs/{_id(id)}", m.JobInfo)


def cancel_job(id: str) -> Call[m.JobInfo]:
    """Cancel a job."""
    return Call("DELETE", f"{WEFT}/jobs/{_id(id)}", m.JobInfo)


def _id(text: str) -> str:
    return quote(text, safe=":")


def _once(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid4().hex}
