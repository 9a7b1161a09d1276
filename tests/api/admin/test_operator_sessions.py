"""Sessions of operators' browsers: they end after an hour without a request, after eight hours, and with their key."""

import re

import httpx
import pytest
from sqlalchemy import func, select

from store.tables import OperatorSession
from tenants.operator_keys import create_operator_key, revoke_operator_key
from tenants.operator_sessions import (
    delete_ended_operator_sessions,
    delete_expired_operator_codes,
    make_operator_code,
)
from tests.api.admin.conftest import Admin

OWN = {"Sec-Fetch-Site": "same-origin"}


async def log_in(http: httpx.AsyncClient, key: str) -> httpx.Response:
    """Log in as a form does; the client keeps no cookie over plain http, so it is sent by hand."""
    answer = await http.post("/ops/login", data={"key": key}, headers=OWN)
    http.headers["Cookie"] = answer.headers.get("set-cookie", "").partition(";")[0]
    return answer


async def status(http: httpx.AsyncClient) -> int:
    return (await http.get("/ops/tenants")).status_code


async def stored(admin: Admin) -> int:
    async with admin.service.database.read() as session:
        return await session.scalar(select(func.count()).select_from(OperatorSession)) or 0


async def test_a_session_ends_an_hour_after_its_last_request(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        assert (await log_in(http, admin.key.secret)).status_code == 303
        for _ in range(3):
            admin.service.clock.move(minutes=59)
            assert await status(http) == 200
        admin.service.clock.move(minutes=60)
        assert await status(http) == 303


async def test_a_page_that_is_only_left_open_ends_idle_and_a_click_keeps_it(admin: Admin) -> None:
    parts = [f"/ops/{name}/now" for name in ("overview", "tenants", "queue", "replicas", "processes")]
    async with (
        httpx.AsyncClient(base_url=admin.url, timeout=40) as left,
        httpx.AsyncClient(base_url=admin.url, timeout=40) as clicking,
    ):
        for one in (left, clicking):
            assert (await log_in(one, admin.key.secret)).status_code == 303
        for past in (20, 40, 60):
            admin.service.clock.move(minutes=20)
            assert [(await left.get(path)).status_code for path in parts] == [200 if past < 60 else 303] * len(parts)
            assert [(await clicking.get(path)).status_code for path in parts] == [200] * len(parts)
            assert await status(clicking) == 200
        assert await status(left) == 303


async def test_a_session_ends_after_eight_hours_whatever_it_does(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        await log_in(http, admin.key.secret)
        for _ in range(15):
            admin.service.clock.move(minutes=30)
            assert await status(http) == 200
        admin.service.clock.move(minutes=30)
        assert await status(http) == 303


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_a_session_ends_with_its_key_and_its_row_is_deleted(admin: Admin, end: str) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        await log_in(http, admin.key.secret)
        assert (await status(http), await stored(admin)) == (200, 1)
        if end == "revoked":
            async with admin.service.database.write() as transaction:
                await revoke_operator_key(transaction, key=admin.key.prefix, clock=admin.service.clock)
        else:
            admin.service.clock.move(hours=9)
        assert await status(http) == 303
        async with admin.service.database.write() as transaction:
            now = admin.service.clock()
            assert await delete_ended_operator_sessions(transaction, now=now, most=10) == 1
        assert await stored(admin) == 0


async def test_many_wrong_keys_make_the_next_ones_wait(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        answers = [(await log_in(http, f"tml-{number:012d}-wrong")).status_code for number in range(11)]
        assert answers == [401] * 10 + [429]
        assert (await log_in(http, admin.key.secret)).status_code == 429
        admin.service.clock.move(minutes=2)
        assert (await log_in(http, admin.key.secret)).status_code == 303


async def test_the_secret_is_stored_nowhere_and_a_page_is_kept_by_nobody(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        answer = await log_in(http, admin.key.secret)
        cookie = answer.headers["set-cookie"]
        assert all(part in cookie for part in ("__Host-weft-ops=", "HttpOnly", "Secure", "SameSite=lax", "Path=/"))
        secret = cookie.partition("=")[2].partition(";")[0]
        async with admin.service.database.read() as session:
            row = (await session.scalars(select(OperatorSession))).one()
        assert secret.encode() not in row.secret_hash
        page = await http.get("/ops/tenants")
        assert page.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        refused = await http.post("/ops/replicas/directive", data={"replica": "one"})
        assert refused.status_code == 403


async def test_an_operator_sees_and_ends_the_browsers_of_its_own_key_and_no_others(admin: Admin) -> None:
    async with admin.service.database.write() as transaction:
        theirs = await create_operator_key(transaction, note="other", expires_at=None, clock=admin.service.clock)
    clients = [
        httpx.AsyncClient(base_url=admin.url, timeout=40, headers={"User-Agent": f"agent {n}"}) for n in range(3)
    ]
    async with clients[0] as first, clients[1] as second, clients[2] as other:
        for one, key in ((first, admin.key.secret), (second, admin.key.secret), (other, theirs.secret)):
            await log_in(one, key)
        page = (await first.get("/ops/browsers")).text
        assert ("agent 0" in page, "agent 1" in page, "agent 2" in page) == (True, True, False)
        ends = re.findall(r'action="(/ops/browsers/\d+/end)"', page)
        assert len(ends) == 1
        assert (await other.post(ends[0], headers=OWN)).status_code == 404
        assert await status(second) == 200
        assert (await first.post(ends[0], headers=OWN)).status_code == 303
        assert [await status(one) for one in (first, second, other)] == [200, 303, 200]
        told = (await admin.http.get("/audit", params={"action": "login_end"})).json()["items"]
        assert [(one["actor"], one["door"]) for one in told] == [(admin.key.prefix, "ui")]


async def test_a_new_login_ends_the_session_that_the_browser_has_and_no_other(admin: Admin) -> None:
    async with (
        httpx.AsyncClient(base_url=admin.url, timeout=40) as browser,
        httpx.AsyncClient(base_url=admin.url, timeout=40) as other,
    ):
        for one in (browser, other):
            await log_in(one, admin.key.secret)
        former = browser.headers["Cookie"]
        assert (await log_in(browser, admin.key.secret)).status_code == 303
        assert [await status(one) for one in (browser, other)] == [200, 200]
        browser.headers["Cookie"] = former
        assert (await status(browser), await stored(admin)) == (303, 2)


async def code(admin: Admin) -> str:
    async with admin.service.database.write() as transaction:
        return (await make_operator_code(transaction, admin.key.prefix, admin.service.clock()))[0]


async def test_a_code_logs_an_operator_in_once_and_soon(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        first, late = await code(admin), await code(admin)
        forged = await http.post("/ops/login/code", data={"code": first}, headers={"Sec-Fetch-Site": "cross-site"})
        assert forged.status_code == 403
        begun = await http.post("/ops/login/code", data={"code": first}, headers=OWN)
        assert (begun.status_code, begun.headers["location"]) == (303, "/ops/overview")
        cookie = begun.headers["set-cookie"].partition(";")[0]
        assert (await http.get("/ops/overview", headers={"Cookie": cookie})).status_code == 200
        assert (await http.post("/ops/login/code", data={"code": first}, headers=OWN)).status_code == 401
        admin.service.clock.move(seconds=61)
        assert (await http.post("/ops/login/code", data={"code": late}, headers=OWN)).status_code == 401
        told = (await admin.http.get("/audit", params={"action": "login_begin"})).json()["items"]
        assert [(one["actor"], one["door"]) for one in told] == [(admin.key.prefix, "ui")]
    async with admin.service.database.write() as transaction:
        assert await delete_expired_operator_codes(transaction, now=admin.service.clock(), most=10) == 1


async def test_a_code_ends_with_its_key_and_guesses_have_to_wait(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        made = await code(admin)
        async with admin.service.database.write() as transaction:
            await revoke_operator_key(transaction, key=admin.key.prefix, clock=admin.service.clock)
        codes = [made, *(f"guess {number}" for number in range(9)), "one more"]
        answers = [(await http.post("/ops/login/code", data={"code": one}, headers=OWN)).status_code for one in codes]
        assert answers == [401] * 10 + [429]
    assert await stored(admin) == 0
