"""The admin API as commands call it: over HTTP, or in this process over the service's database. Both run the same endpoints."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel

from api.admin import ADMIN_PREFIX
from api.admin.bodies import MOST_ROWS, Listed
from api.admin.services import AdminServices
from cli.administration import check_is_made, checked_database
from cli.answers import read_answer
from cli.housekeeper import CommandHousekeeper
from cli.noted_wakeups import NotedWakeups, tell
from cli.operator_log import noted_command, operator
from cli.options import load_settings
from contracts.errors import EditConflict, Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable, WeftError
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.telemetry import Telemetry
from tenants.audit_tally import AuditTally
from tenants.limits import Limits
from tenants.operator_keys import Operator
from tenants.signed_tokens import TokenSigner

M = TypeVar("M", bound=BaseModel)

_SECONDS = 60.0
"""Longest wait for an answer, but for what takes as long as it takes."""
_ERRORS: dict[int, type[WeftError]] = {401: Unauthenticated, 403: Forbidden, 404: NotFound, 412: EditConflict}


@dataclass(frozen=True, slots=True)
class Door:
    """Way to the service: the admin API at ``url`` with an operator's ``key``, or else the database of the data folder."""

    url: str | None
    key: str | None
    data: Path | None


class AdminClient:
    """Calls of the admin API, each with the record that it answers. Every call raises ``WeftError``."""

    def __init__(self, runner: asyncio.Runner, http: httpx2.AsyncClient) -> None:
        self._runner = runner
        self._http = http

    def get(self, path: str, model: type[M], **query: object) -> M:
        """Return what is at ``path``."""
        return read_answer(model, self._call("GET", path, query=query))

    def computed(self, path: str, model: type[M], **query: object) -> M:
        """Return what the service computes of many rows, however long that takes."""
        return read_answer(model, self._call("GET", path, query=query, timeout=None))

    def pieces(self, path: str, *, heard: Callable[[httpx2.Headers], None], **query: object) -> Iterator[str]:
        """Yield a document piece by piece, as it comes. ``heard`` gets the answer's headers first."""
        given = {name: _told(value) for name, value in query.items() if value is not None}
        made = self._pieces(f"{ADMIN_PREFIX}{path}", given, heard)
        with self._explained():
            while (piece := self._runner.run(_next(made))) is not None:
                yield piece

    def get_versioned(self, path: str, model: type[M]) -> tuple[M, str | None]:
        """Return what is at ``path``, and its version for a change, None from a service that names none."""
        answer = self._call("GET", path)
        return read_answer(model, answer), answer.headers.get("etag")

    def every(self, path: str, model: type[M], **query: object) -> list[M]:
        """Return the rows of all pages of a list."""
        rows: list[M] = []
        while True:
            page = self.page(path, model, limit=MOST_ROWS, **query)
            rows += page.items
            if page.next is None:
                return rows
            query["after"] = page.next

    def page(self, path: str, model: type[M], **query: object) -> Listed[M]:
        """Return one page of a list."""
        return read_answer(Listed[model], self._call("GET", path, query=query))  # type: ignore[valid-type]

    def send(self, method: str, path: str, model: type[M], body: BaseModel | None = None, **headers: str | None) -> M:
        """Change something, and return what the service answers."""
        return read_answer(model, self._call(method, path, body=body, headers=headers))

    def carry_out(self, path: str, model: type[M], body: BaseModel) -> M:
        """Have the service do something that takes as long as it takes, and return what it answers."""
        return read_answer(model, self._call("POST", path, body=body, timeout=None))

    def delete(self, path: str, **query: object) -> None:
        """Delete something that answers nothing."""
        self._call("DELETE", path, query=query)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, object] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str | None] | None = None,
        timeout: float | None = _SECONDS,
    ) -> httpx2.Response:
        given = {name: _told(value) for name, value in (query or {}).items() if value is not None}
        named = {name.replace("_", "-"): value for name, value in (headers or {}).items() if value is not None}
        content = None if body is None else body.model_dump_json().encode()
        url = f"{ADMIN_PREFIX}{path}"
        request = self._http.request(method, url, params=given, content=content, headers=named, timeout=timeout)
        with self._explained():
            answer = self._runner.run(request)
        if answer.is_error:
            raise _refusal(answer)
        return answer

    async def _pieces(
        self, url: str, query: dict[str, str | list[str]], heard: Callable[[httpx2.Headers], None]
    ) -> AsyncIterator[str]:
        async with self._http.stream("GET", url, params=query) as answer:
            if answer.is_error:
                await answer.aread()
                raise _refusal(answer)
            heard(answer.headers)
            async for piece in answer.aiter_text():
                yield piece

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx2.HTTPError as error:
            raise Unavailable(f"the admin API at {self._http.base_url} does not answer: {error}") from error


def segment(text: str) -> str:
    """Return an id or a name as a part of a path."""
    return quote(text, safe="")


@contextmanager
def open_admin(door: Door, *, may_begin: bool = False) -> Iterator[AdminClient]:
    """Open the way to the service; close it on leaving. Raises ``WeftError``. Exit with 2 where there is no database.

    On the database, the service's processes are told of changes on leaving. A cluster is told over Redis; `weft serve`
    listens to no other process, and follows at its next look, within seconds. ``may_begin`` as ``check_is_made`` has it.
    """
    if door.url is not None:
        with _opened(_over_http(door)) as admin:
            yield admin
        return
    # The settings are read first: a wrong one ends the command before anything is open.
    settings = load_settings(data=door.data)
    check_is_made(settings, may_begin=may_begin)
    with noted_command(settings), _opened(_in_process(settings)) as admin:
        yield admin


@contextmanager
def _opened(opened: AbstractAsyncContextManager[httpx2.AsyncClient]) -> Iterator[AdminClient]:
    with asyncio.Runner() as runner:
        http = runner.run(opened.__aenter__())
        try:
            yield AdminClient(runner, http)
        finally:
            runner.run(opened.__aexit__(None, None, None))


@asynccontextmanager
async def _over_http(door: Door) -> AsyncIterator[httpx2.AsyncClient]:
    if not door.key:
        raise Unauthenticated("no operator's key; give --key or WEFT_ADMIN_KEY (`weft operator create` makes one)")
    headers = {"X-API-Key": door.key}
    async with httpx2.AsyncClient(base_url=door.url or "", headers=headers, timeout=_SECONDS) as http:
        yield http


@asynccontextmanager
async def _in_process(settings: Settings) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an admin API of this process, which acts as the user who runs the command."""
    # Imported late: a command over HTTP needs no application.
    from api.admin.app import create_admin_app

    await asyncio.to_thread(checked_database, settings)
    database = Database(create_engine(settings.resolved_database_url()))
    wakeups = NotedWakeups()
    try:
        app = create_admin_app(_services(settings, database, wakeups))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(base_url="http://database", transport=transport, timeout=None) as http:
            yield http
        await tell(settings, list(wakeups.announced))
    finally:
        await database.close()


def _services(settings: Settings, database: Database, wakeups: NotedWakeups) -> AdminServices:
    folder, telemetry = DataFolder(settings.data_dir), Telemetry.of("cli", utc_now)
    ledger = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(folder))
    runtime = Runtime(
        settings=settings,
        database=database,
        ledger=ledger,
        wakeups=wakeups,
        feed=TokenFeed(),
        publication=LocalPublication(),
        data_folder=folder,
        clock=utc_now,
        telemetry=telemetry,
    )

    async def this_user(_request: object) -> Operator:
        return Operator(operator())

    return AdminServices(
        runtime=runtime,
        limits=Limits.of(settings),
        signer=TokenSigner(folder, utc_now),
        authenticate=this_user,
        housekeeper=CommandHousekeeper(settings, database),
        audit_tally=AuditTally(database, utc_now),
    )


def _refusal(answer: httpx2.Response) -> WeftError:
    """Return the error that the service answers. One that is the service's own fault is ``Unavailable``."""
    try:
        found: Any = answer.json()
        detail = str(found["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"the service answers {answer.status_code} without a reason; is this the admin API's address?"
    kind = Unavailable if answer.status_code >= 500 else _ERRORS.get(answer.status_code, InvalidRequest)
    return kind(detail)


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


def _told(value: object) -> str | list[str]:
    return [_text(one) for one in value] if isinstance(value, list) else _text(value)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
