"""Work of pages counts to the tenant whose web session asks, from whatever address, and only while the session goes on."""

import pytest

from api.loop_time import LoopTime
from contracts.ids import TenantId
from tests.api.dashboard.visits import visitor

ADDRESS = "10.0.0.1"


def _scope(*cookies: str) -> dict[str, object]:
    headers = [(b"cookie", cookie.encode("latin-1")) for cookie in cookies]
    return {"type": "http", "path": "/ui", "headers": headers, "client": (ADDRESS, 1)}


async def test_browsers_behind_one_address_count_as_their_tenants(service, cats, dogs) -> None:
    loop_time = service.services.admission.loop_time
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        own, theirs = _scope(http.headers["cookie"]), _scope(other.headers["cookie"])
        assert loop_time.name_of(own) == (f"tenant {cats.id}", False)
        assert loop_time.name_of(theirs) == (f"tenant {dogs.id}", False)
        assert (await http.post("/ui/logout")).status_code == 303
        assert loop_time.name_of(own) == (f"address {ADDRESS}", True)
        assert loop_time.name_of(theirs) == (f"tenant {dogs.id}", False)


async def test_a_session_that_has_ended_counts_as_a_stranger_from_its_next_request_on(service, cats, dogs) -> None:
    loop_time = service.services.admission.loop_time
    async with visitor(service, cats.key) as http:
        own = _scope(http.headers["cookie"])
        service.clock.move(hours=25)
        async with visitor(service, dogs.key) as other:
            assert (await http.get("/ui")).status_code == 303
            assert loop_time.name_of(own) == (f"address {ADDRESS}", True)
            assert loop_time.name_of(_scope(other.headers["cookie"])) == (f"tenant {dogs.id}", False)


async def test_another_process_knows_a_session_once_it_has_looked_it_up(service, cats, dogs) -> None:
    loop_time = service.services.admission.loop_time
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        for one in (http, other):
            loop_time.forget(one.headers["cookie"].partition("=")[2])
        assert (await http.get("/ui")).status_code == 200
        assert loop_time.name_of(_scope(http.headers["cookie"])) == (f"tenant {cats.id}", False)
        assert loop_time.name_of(_scope(other.headers["cookie"])) == (f"address {ADDRESS}", True)


@pytest.mark.parametrize(
    ("cookies", "is_known"),
    [
        (("a=b; __Host-weft=secret-1; c=d",), True),
        (('__Host-weft="secret-1"',), True),
        (("a=b", "__Host-weft=secret-1"), True),
        (("__Host-weft=made-up; weft-insecure=secret-1",), True),
        (("no__Host-weft=secret-1",), False),
        (("__Host-weft=secret-1 x",), False),
        ((f"__Host-weft={'x' * 101}",), False),
        (("; " * 30_000 + "=", "\xff;__Host-weft"), False),
        (("__Host-weft=",), False),
    ],
)
def test_a_session_is_found_in_any_headers_and_in_none_that_only_look_alike(cookies, is_known) -> None:
    loop_time = LoopTime()
    loop_time.know("secret-1", TenantId("cats"))
    loop_time.know("x" * 101, TenantId("dogs"))
    assert loop_time.name_of(_scope(*cookies)) == (("tenant cats", False) if is_known else (f"address {ADDRESS}", True))
