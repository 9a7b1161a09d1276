"""Requests of the operators' client.

They may be sent again: they read, set a state, or have an ``Idempotency-Key``, which is the same in every repeat that the client
sends by itself. A change that names the state it changes (``If-Match``) is made by ``sent_once``: its repeat would be answered
as a conflict, so ``OutcomeUnknown`` is raised where its answer is lost. So is long work: a repeat would begin it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from weft_client.call import Call

if TYPE_CHECKING:
    from weft_client.admin_models import Page
    from weft_client.models import Record

ADMIN = "/admin/v1"

R = TypeVar("R", bound="Record")


def path(*parts: str | int) -> str:
    """Return the path below the API's prefix; ids and names are made its parts."""
    return "".join(f"/{quote(str(part), safe=':')}" for part in parts)


def below_checkpoints(checkpoint: str) -> str:
    """Return the path of a checkpoint that is named as ``tinker://run/segment/name``."""
    return path("checkpoints", *checkpoint.removeprefix("tinker://").split("/"))


def call(
    method: str,
    below: str,
    answer: type[R] | None = None,
    *,
    query: Mapping[str, Any] | None = None,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Call[R]:
    """Return the request; a query's values that are None are left out."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return Call(method, ADMIN + below, answer, given, body=body, headers=headers or {})


def sent_once(asked: Call[R]) -> Call[R]:
    """Return the request, never to be repeated once it may have taken effect."""
    return replace(asked, is_safe_twice=False)


def patient(asked: Call[R]) -> Call[R]:
    """Return the request, whose answer is computed of many rows and may take an hour."""
    return replace(asked, seconds=3600.0)


def listed(below: str, page: type[Page[R]], **query: Any) -> Call[Page[R]]:
    """Return the request of a list's first page."""
    return call("GET", below, page, query=query)


def once(key: str | None) -> dict[str, str]:
    """Return the header by which a repeat of what must happen once is known."""
    return {"Idempotency-Key": key or uuid4().hex}
