"""Requests of the client, each made by one function. What sends them is ``weft_client.transport``.

Every request of a tenant may be sent again: it reads, it sets a state, or it has an ``Idempotency-Key``. Two are no such:

- A gate's change at a generation: the change itself ends the generation.
- An archive's part: the service may keep some of it, and its place is another then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

from weft_client.bodies import webhook_state
from weft_client.call import Archive, Call
from weft_client.modules import Later

if TYPE_CHECKING:
    from weft_client import models as m
else:
    m = Later("weft_client.models")

TINKER, WEFT = "/api/v1", "/api/weft/v1"


def runs(which: Mapping[m.RunFilter, str | None], *, recent: int, limit: int, cursor: str | None) -> Call[m.RunList]:
    """Read a page of runs."""
    query: dict[str, Any] = {name: value for name, value in which.items() if value is not None}
    query |= {"recent": recent, "limit": limit} | ({} if cursor is None else {"cursor": cursor})
    return Call("GET", f"{WEFT}/runs", m.RunList, query)


def run(id: str, *, recent: int) -> Call[m.RunInfo]:
    """Describe a run."""
    return Call("GET", f"{WEFT}/runs/{_id(id)}", m.RunInfo, {"recent": recent})


def weigh_run(run: str, weight: float) -> Call[m.RunWeight]:
    """Give a run a weight among the tenant's runs."""
    return Call("PUT", f"{WEFT}/runs/{_id(run)}/weight", m.RunWeight, body={"weight": weight})


def marks(run: str) -> Call[m.MarkList]:
    """Read the marks of a run's curve."""
    return Call("GET", f"{WEFT}/runs/{_id(run)}/marks", m.MarkList)


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


def waiting(run: str) -> Call[m.WaitingInfo]:
    """Tell why a run waits."""
    return Call("GET", f"{WEFT}/runs/{_id(run)}/waiting", m.WaitingInfo)


def request_waiting(request: str) -> Call[m.WaitingInfo]:
    """Tell why a request waits."""
    return Call("GET", f"{WEFT}/requests/{_id(request)}/waiting", m.WaitingInfo)


def gate(run: str, *, is_tried_once: bool = False) -> Call[m.GateState]:
    """Describe an adapter's gate."""
    return Call("GET", f"{TINKER}/adapters/{_id(run)}", m.GateState, is_tried_once=is_tried_once)


def adapters(*, limit: int, cursor: str | None, offset: int | None) -> Call[m.AdapterList]:
    """Read a page of adapters with their gates."""
    return Call("GET", f"{WEFT}/adapters", m.AdapterList, _given(limit=limit, cursor=cursor, offset=offset))


def pause(
    run: str,
    *,
    mode: m.GateMode,
    reason: str | None,
    ttl: float | None,
    wait_seconds: float,
    clear_cache: bool,
    generation: int | None,
) -> Call[m.GateState]:
    """Pause an adapter; the answer comes once nothing is in flight, or after ``wait_seconds``."""
    body = {
        "mode": mode,
        "reason": reason,
        "ttl_seconds": ttl,
        "timeout_seconds": wait_seconds,
        "clear_cache": clear_cache,
        "generation": generation,
    }
    path, is_safe_twice = f"{TINKER}/adapters/{_id(run)}/pause", generation is None
    return Call("POST", path, m.GateState, body=body, seconds=wait_seconds, is_safe_twice=is_safe_twice)


def resume(run: str, *, generation: int | None) -> Call[m.GateState]:
    """End a pause; with ``generation`` only that one. A repeat of any might end a later pause of somebody else."""
    path, body = f"{TINKER}/adapters/{_id(run)}/resume", {"generation": generation}
    return Call("POST", path, m.GateState, body=body, is_safe_twice=False)


def reload(run: str, *, path: str | None) -> Call[m.Reloaded]:
    """Have live samplers follow a version, the newest by default."""
    return Call("POST", f"{TINKER}/adapters/{_id(run)}/reload", m.Reloaded, body={"path": path})


def staleness(sampler: str) -> Call[m.StalenessInfo]:
    """Describe a live sampler's bound."""
    return Call("GET", f"{TINKER}/samplers/{_id(sampler)}/staleness", m.StalenessInfo)


def bound_staleness(
    sampler: str, *, max_version_lag: int | None, on_stale: m.OnStale, swap_policy: m.SwapPolicy | None
) -> Call[m.StalenessInfo]:
    """Set a live sampler's bound and swap policy."""
    body = {"max_version_lag": max_version_lag, "on_stale": on_stale, "swap_policy": swap_policy}
    return Call("POST", f"{TINKER}/samplers/{_id(sampler)}/staleness", m.StalenessInfo, body=body)


def report(request: str) -> Call[m.SampleInfo]:
    """Report on a finished sample."""
    return Call("GET", f"{TINKER}/samples/{_id(request)}", m.SampleInfo)


def samples(*, limit: int, after: str | None) -> Call[m.SampleList]:
    """Read a page of finished samples."""
    return Call("GET", f"{WEFT}/samples", m.SampleList, _given(limit=limit, after=after))


def client_exceptions(
    *, session: str | None, run: str | None, limit: int, after: int | None
) -> Call[m.ClientExceptionList]:
    """Read a page of the exceptions of clients' scripts."""
    query = _given(session_id=session, run_id=run, limit=limit, after=after)
    return Call("GET", f"{WEFT}/client-exceptions", m.ClientExceptionList, query)


def operations(
    *, state: m.OperationState, lane: str | None, kind: str | None, limit: int, after: str | None
) -> Call[m.OperationList]:
    """Read a page of operations."""
    query = _given(state=state, lane=lane, kind=kind, limit=limit, after=after)
    return Call("GET", f"{WEFT}/operations", m.OperationList, query)


def usage(
    *,
    since: datetime,
    before: datetime | None,
    group_by: Collection[m.Dimension],
    bucket_width: m.BucketWidth,
    limit: int,
    offset: int,
    cursor: str | None,
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
    if cursor is not None:
        query["cursor"] = cursor
    return Call("GET", f"{WEFT}/usage", m.Usage, query)


def export_usage(*, since: datetime, before: datetime | None, format: m.UsageDocument) -> Call[m.Record]:
    """Export usage as a document of lines."""
    query = {"since": since.isoformat(), "format": format} | ({} if before is None else {"before": before.isoformat()})
    return Call("GET", f"{WEFT}/usage/export", None, query)


def standing() -> Call[m.StandingReport]:
    """Read the limits and their use."""
    return Call("GET", f"{WEFT}/usage/standing", m.StandingReport)


def audit(
    *,
    action: Collection[str],
    resource: Collection[str],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    cursor: str | None,
    limit: int,
) -> Call[m.AuditPageBody]:
    """Read a page of the audit log."""
    query: dict[str, Any] = {"action": list(action), "resource": list(resource), "key": key, "cursor": cursor}
    query |= {"since": since and since.isoformat(), "until": until and until.isoformat(), "limit": limit}
    given = {name: value for name, value in query.items() if value is not None}
    return Call("GET", f"{WEFT}/audit", m.AuditPageBody, given)


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


def bound_key(key: int, limits: Mapping[str, int | None]) -> Call[m.KeyBody]:
    """Give a key rates of its own."""
    return Call("PUT", f"{WEFT}/keys/{key}/limits", m.KeyBody, body={"limits": dict(limits)})


def revoke_key(key: int) -> Call[m.KeyList]:
    """Revoke a key at once."""
    return Call("DELETE", f"{WEFT}/keys/{key}", None)


def projects() -> Call[m.ProjectList]:
    """List the projects that the key reaches."""
    return Call("GET", f"{WEFT}/projects", m.ProjectList)


def make_project(name: str) -> Call[m.ProjectBody]:
    """Make a project; a repeat finds the first one."""
    return Call("POST", f"{WEFT}/projects", m.ProjectBody, body={"name": name})


def checkpoints(
    *,
    run: str | None,
    type: m.CheckpointType | None,
    name: str | None,
    public: bool | None,
    expires_within: int | None,
    limit: int,
    cursor: str | None,
    offset: int | None,
) -> Call[m.KeptCheckpoints]:
    """Read a page of checkpoints."""
    place = {"limit": limit, "cursor": cursor, "offset": offset}
    query = _given(run=run, type=type, name=name, public=public, expires_within=expires_within, **place)
    return Call("GET", f"{WEFT}/checkpoints", m.KeptCheckpoints, query)


def bound_project(project: str, limits: Mapping[str, int | None]) -> Call[m.ProjectBody]:
    """Give a project limits of its own."""
    path = f"{WEFT}/projects/{_id(project)}/limits"
    return Call("PUT", path, m.ProjectBody, body={"limits": dict(limits)})


def delete_checkpoints(paths: Collection[str]) -> Call[m.DeletedCheckpoints]:
    """Delete up to 1,000 checkpoints."""
    return Call("POST", f"{WEFT}/checkpoints/delete", m.DeletedCheckpoints, body={"paths": list(paths)})


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
    project: str | None,
    offset: int,
    idempotency_key: str | None,
) -> Call[m.JobInfo]:
    """Have a tar of PEFT's adapter files taken in as a checkpoint."""
    query = {
        "base_model": base_model,
        "name": name,
        "segment": segment,
        "ttl_seconds": ttl_seconds,
        "project_id": project,
    }
    given = {key: value for key, value in query.items() if value is not None}
    headers = {"Content-Type": "application/x-tar", **_once(idempotency_key)}
    if offset:
        headers["Upload-Offset"] = str(offset)
    path, is_rest = f"{WEFT}/imports", offset > 0
    return Call("POST", path, m.JobInfo, given, content=archive, headers=headers, is_rest=is_rest)


def received(idempotency_key: str) -> Call[m.ReceivedBytes]:
    """Tell how much has come of an archive whose upload broke off."""
    return Call("GET", f"{WEFT}/imports/received", m.ReceivedBytes, headers=_once(idempotency_key))


def jobs(*, limit: int) -> Call[m.JobList]:
    """List jobs, newest first."""
    return Call("GET", f"{WEFT}/jobs", m.JobList, {"limit": limit})


def job(id: str) -> Call[m.JobInfo]:
    """Describe a job."""
    return Call("GET", f"{WEFT}/jobs/{_id(id)}", m.JobInfo)


def cancel_job(id: str) -> Call[m.JobInfo]:
    """Cancel a job."""
    return Call("DELETE", f"{WEFT}/jobs/{_id(id)}", m.JobInfo)


def _given(**query: Any) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _id(text: str) -> str:
    return quote(text, safe=":")


def _once(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid4().hex}


def webhooks() -> Call[m.WebhookList]:
    """List the webhooks."""
    return Call("GET", f"{WEFT}/webhooks", m.WebhookList)


def set_webhook(
    name: str, *, url: str | None, events: Collection[str] | None, note: str | None, is_enabled: bool | None
) -> Call[m.WebhookBody]:
    """Make a webhook, or change what is given of it."""
    body = webhook_state(url, events, note, is_enabled)
    return Call("PUT", f"{WEFT}/webhooks/{_id(name)}", m.WebhookBody, body=body)


def delete_webhook(name: str) -> Call[Any]:
    """Delete a webhook."""
    return Call("DELETE", f"{WEFT}/webhooks/{_id(name)}", None)


def webhook_secret(name: str) -> Call[m.WebhookSecretBody]:
    """Read the secret of a webhook."""
    return Call("GET", f"{WEFT}/webhooks/{_id(name)}/secret", m.WebhookSecretBody)


def rotate_webhook_secret(name: str, *, idempotency_key: str | None) -> Call[m.WebhookSecretBody]:
    """Give a webhook another secret."""
    headers = _once(idempotency_key)
    return Call("POST", f"{WEFT}/webhooks/{_id(name)}/secret", m.WebhookSecretBody, headers=headers)


def test_webhook(name: str, *, idempotency_key: str | None) -> Call[m.WebhookEventBody]:
    """Send a test event."""
    return Call("POST", f"{WEFT}/webhooks/{_id(name)}/test", m.WebhookEventBody, headers=_once(idempotency_key))


def webhook_events(name: str, *, before: int | None) -> Call[m.WebhookEventList]:
    """Read a page of a webhook's events."""
    query = {} if before is None else {"before": before}
    return Call("GET", f"{WEFT}/webhooks/{_id(name)}/events", m.WebhookEventList, query)


def retry_webhook_event(name: str, event: str) -> Call[m.WebhookEventBody]:
    """Send an event once more."""
    return Call("POST", f"{WEFT}/webhooks/{_id(name)}/events/{_id(event)}/retry", m.WebhookEventBody)
