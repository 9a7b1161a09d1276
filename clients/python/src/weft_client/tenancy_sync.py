"""Usage, audit log, keys and projects of a tenant, without asyncio.

``clients/python/make_sync.py`` makes this file of ``weft_client.tenancy_async``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from weft_client import calls
from weft_client.transport_sync import Transport

if TYPE_CHECKING:
    from weft_client import models

_PAGE = 1000


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
        cursor: str | None = None
        offset: int | None = 0
        while cursor is not None or offset is not None:
            page = self._transport.send(
                calls.usage(
                    since=since,
                    before=before,
                    group_by=group_by,
                    bucket_width=bucket_width,
                    limit=_PAGE,
                    offset=offset or 0,
                    cursor=cursor,
                )
            )
            for line in page.lines:
                yield line
            cursor, offset = page.next_cursor, None if page.next_cursor else page.next_offset

    def export(
        self, *, since: datetime, before: datetime | None = None, format: models.UsageDocument = "focus"
    ) -> Iterator[str]:
        """Yield the lines of FOCUS 1.2 CSV, or a CloudEvent a line, of the hours that change no more."""
        for line in self._transport.lines(calls.export_usage(since=since, before=before, format=format)):
            yield line

    def standing(self) -> models.StandingReport:
        """Return the tenant's limits and their use."""
        return self._transport.send(calls.standing())


class Audit:
    """Audit log of the tenant: who did what."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def entries(
        self,
        *,
        action: Collection[str] = (),
        resource: Collection[str] = (),
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[models.AuditInfo]:
        """Yield entries, newest first, page by page: of these actions or kinds of things, by this key."""
        cursor: str | None = None
        while True:
            page = self._transport.send(
                calls.audit(
                    action=action, resource=resource, key=key, since=since, until=until, cursor=cursor, limit=_PAGE
                )
            )
            for entry in page.entries:
                yield entry
            if (cursor := page.next_cursor) is None:
                return


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
        limits: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> models.MadeKey:
        """Make a key; its secret is in the answer only. The right to each bound is the caller's own."""
        rights: dict[str, Any] = {"note": note, "role": role, "expires_at": expires_at, "max_rank": max_rank}
        lists = {"scopes": scopes, "projects": projects, "base_models": base_models, "networks": networks}
        rights |= {name: None if given is None else [*given] for name, given in lists.items()}
        rights["limits"] = None if limits is None else dict(limits)
        return self._transport.send(calls.make_key(rights, idempotency_key=idempotency_key))

    def rotate(self, key: int, *, grace: int = 3600, idempotency_key: str | None = None) -> models.MadeKey:
        """Make a key with the same rights; the old one ends after ``grace`` seconds."""
        return self._transport.send(calls.rotate_key(key, grace=grace, idempotency_key=idempotency_key))

    def bound(self, key: int, limits: Mapping[str, int | None]) -> models.KeyBody:
        """Give a key rates of its own, within the tenant's; None for none."""
        return self._transport.send(calls.bound_key(key, limits))

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

    def bound(self, project: str, limits: Mapping[str, int | None]) -> models.ProjectBody:
        """Give a project, by its id or name, limits within the tenant's; None for none."""
        return self._transport.send(calls.bound_project(project, limits))
