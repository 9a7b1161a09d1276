"""Pages of a suspended tenant refuse what the API refuses; a second tenant's go on."""

import httpx
import pytest

from tenants.rights import SuspendMode
from tenants.suspensions import suspend_tenant
from tests.api.audited_pages import TENANTS, TENANTS_UNAUDITED
from tests.api.dashboard.visits import SAME, key_of, log_in, routes, visitor
from tests.api.worlds import World, opened_world

_CHECKPOINT = "/ui/checkpoints/{run_id}/{segment}/{name}"
GO_ON = {
    "/ui/adapters/{run_id}/resume",
    f"{_CHECKPOINT}/unpublish",
    f"{_CHECKPOINT}/download",
    f"{_CHECKPOINT}/delete",
    "/ui/checkpoints/delete",
    "/ui/keys/{number}/rotate",
    "/ui/keys/{number}/revoke",
    "/ui/webhooks/{name}/delete",
    "/ui/sessions/{number}/end",
    "/ui/sessions/others/end",
    "/ui/samples/{request_id}/stop",
    "/ui/logout",
}
"""Forms that end, free or take back something, or make a link to read by."""
THEMSELVES = {"/ui/playground", "/ui/playground/stream"}
"""Forms that tell the refusal beside the model's name."""
OPEN = {"/ui/login", "/ui/login/code", "/ui/policy-reports"}
"""Forms that need no session."""


async def _suspend(world: World, mode: SuspendMode) -> None:
    async with world.service.database.write() as transaction:
        now = world.service.clock()
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=now, mode=mode)


def _place(path: str, world: World) -> str:
    ids = {"run_id": world.own["run"], "segment": "weights", "name": "one", "number": "1000", "event_id": "none"}
    ids |= {"request_id": world.own["request"], "sampler_id": world.own["sampler"], "session_id": world.own["session"]}
    for name, id in ids.items():
        path = path.replace(f"{{{name}}}", id)
    return path


def _is_suspended(answer: httpx.Response) -> bool:
    return answer.status_code == 403 and "unpaid" in answer.text and "suspended" in answer.text


async def test_a_read_only_tenants_pages_are_shown_and_change_nothing_but_what_they_end(service, cats, dogs) -> None:
    key = await key_of(service, cats)
    forms = [one.path for one in TENANTS] + list(TENANTS_UNAUDITED)
    assert set(forms) >= GO_ON | THEMSELVES | OPEN
    async with opened_world(service, cats, dogs) as world, visitor(service, key.secret) as http:
        await _suspend(world, SuspendMode.READ_ONLY)
        before, refused = await world.counts(), 0
        for path in set(forms) - GO_ON - THEMSELVES - OPEN:
            answer = await http.post(_place(path, world), data={"name": "x", "url": "https://bell.example/"})
            assert _is_suspended(answer), (path, answer.status_code)
            refused += 1
        assert refused > 10
        told = await http.post("/ui/playground", data={"model": "test/tiny", "prompt": "x", "max_tokens": "1"})
        assert told.status_code == 200
        assert await world.counts() == before
        for path, route in routes(service):
            if "GET" in route.methods and "{" not in path and "events" not in path:
                assert (await http.get(path)).status_code == (400 if path == "/ui/runs/compare" else 200), path
        for path in GO_ON - {"/ui/logout"}:
            answer = await http.post(_place(path, world), data={"name": "one"})
            assert not _is_suspended(answer), (path, answer.status_code)
        assert (await log_in(http, key.secret)).status_code == 303
        assert (await http.post("/ui/logout", headers=SAME)).status_code == 303


@pytest.mark.parametrize("is_form", [True, False])
async def test_a_blocked_tenant_is_shown_no_page_and_a_second_tenants_are_shown(
    service, cats, dogs, is_form: bool
) -> None:
    key, other = await key_of(service, cats), await key_of(service, dogs)
    async with (
        opened_world(service, cats, dogs) as world,
        visitor(service, other.secret) as theirs,
        visitor(service, key.secret) as http,
    ):
        await _suspend(world, SuspendMode.BLOCKED)
        before, asked = await world.counts(), 0
        for path, route in routes(service):
            if path in OPEN | {"/ui/logout"} or "static" in path or "login" in path:
                continue
            place = _place(path, world)
            if is_form and route.methods - {"GET", "HEAD"}:
                assert _is_suspended(await http.post(place, data={"name": "one"})), path
                asked += 1
            if not is_form and "GET" in route.methods:
                assert _is_suspended(await http.get(place)), path
                asked += 1
        assert asked > 20
        assert await world.counts() == before
        refused = await log_in(http, key.secret)
        assert (refused.status_code, "unpaid" in refused.text) == (403, True)
        assert (await theirs.get("/ui")).status_code == 200
        assert (await theirs.post("/ui/projects", data={"name": "bones"})).status_code == 303
        assert (await http.post("/ui/logout")).status_code == 303
