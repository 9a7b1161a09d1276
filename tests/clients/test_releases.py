"""A client and a service of today get along with those of each release, whose documents lie in ``documents``."""

import copy
import re
from typing import Any

import httpx
import pytest
from weft_client.call import Call
from weft_client.errors import WeftClientError
from weft_client.transport import read

from tests.clients import admin_methods, tenants_methods
from tests.clients.compatibility import breaks
from tests.clients.noted_calls import Method
from tests.clients.released import APIS, Document, documents_now, released
from tests.other_versions import Service, Version

RELEASED = released()
METHODS: dict[str, tuple[dict[str, Any], Method]] = {
    "tenants": (tenants_methods.METHODS, tenants_methods.tenants_call),
    "admin": (admin_methods.METHODS, admin_methods.admins_call),
}


@pytest.fixture(scope="module")
def now() -> dict[str, Document]:
    return documents_now()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("release", RELEASED)
def test_a_client_of_a_release_works_with_the_service_of_today(
    now: dict[str, Document], release: str, api: str
) -> None:
    assert breaks(RELEASED[release][api], now[api]) == []


def answer_of(document: Document, call: Call[Any]) -> str | None:
    """Return the name of the schema of the call's answer; None: the release does not have it, or answers no record."""
    for path, methods in document["paths"].items():
        pattern = re.sub(r"\{[^}]*\}", "[^/]+", path)
        if call.method.lower() in methods and re.fullmatch(pattern, call.path) and call.answer is not None:
            (answer,) = methods[call.method.lower()]["responses"].values()
            return str(answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2])
    return None


@pytest.mark.parametrize("version", [Version.SAME, Version.OLDER])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("release", RELEASED)
async def test_a_client_of_today_reads_the_answers_of_a_release(release: str, api: str, version: Version) -> None:
    document = RELEASED[release][api]
    names, call_of = METHODS[api]
    unread, answered = [], 0
    for name in names:
        call = await call_of(name)
        if (schema := answer_of(document, call)) is None:
            continue
        answered += 1
        try:
            read(call, httpx.Response(200, json=Service(document, version).record(schema)))
        except WeftClientError as error:
            unread.append(f"{name}: {error.__cause__}")
    assert unread == []
    assert answered > 30


# --- changes of a document, and whether they are seen ------------------------------------------------------------------

_NULL = {"type": "null"}
BREAKS: list[tuple[str, Any, str]] = [
    ("paths./api/weft/v1/jobs.get", None, "GET /api/weft/v1/jobs is gone"),
    ("paths./api/weft/v1/jobs.get.parameters", [], "takes no query limit"),
    (
        "paths./api/weft/v1/jobs.get.parameters",
        [{"name": "limit", "in": "query", "required": True, "schema": {"type": "integer"}}],
        "wants query limit",
    ),
    ("paths./api/weft/v1/merges.post.requestBody", None, "takes no body"),
    ("components.schemas.MergeBody.properties.dtype", None, "body.dtype is gone"),
    ("components.schemas.MergeBody.required", ["path", "name", "dtype"], "body.dtype is wanted"),
    ("components.schemas.MergeBody.properties.name", {"type": "integer"}, "body.name may not be string"),
    ("components.schemas.Role.enum", ["member", "billing", "admin"], "body.role may not be viewer"),
    ("components.schemas.JobInfo.properties.state", None, ".jobs[].state is gone"),
    ("components.schemas.JobInfo.required", ["id"], ".jobs[].state may be missing"),
    ("components.schemas.RunWeight.properties.weight", {"anyOf": [{"type": "number"}, _NULL]}, ".weight may be null"),
    ("components.schemas.RunWeight.properties.weight", {"type": "string"}, ".weight may be string"),
]
ADDITIONS: list[tuple[str, Any]] = [
    ("components.schemas.JobInfo.properties.more", {"type": "string"}),
    ("components.schemas.MergeBody.properties.more", {"anyOf": [{"type": "string"}, _NULL]}),
    ("components.schemas.RunWeight.properties.weight", {"type": "integer"}),
    ("components.schemas.JobState", {"type": "string"}),
    ("paths./api/weft/v1/more", {"get": {"parameters": [], "responses": {"200": {}}}}),
]


def changed(document: Document, place: str, value: Any) -> Document:
    """Return a copy with another value at a place; None: without what is there."""
    made = copy.deepcopy(document)
    *above, last = place.split(".")
    inside = made
    for part in above:
        inside = inside[part]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    return made


@pytest.mark.parametrize(("place", "value", "told"), BREAKS)
def test_a_change_that_breaks_an_older_client_is_told(
    now: dict[str, Document], place: str, value: Any, told: str
) -> None:
    found = breaks(now["tenants"], changed(now["tenants"], place, value))
    assert any(line.endswith(told) for line in found), found


@pytest.mark.parametrize(("place", "value"), ADDITIONS)
def test_an_addition_breaks_no_older_client(now: dict[str, Document], place: str, value: Any) -> None:
    assert breaks(now["tenants"], changed(now["tenants"], place, value)) == []
