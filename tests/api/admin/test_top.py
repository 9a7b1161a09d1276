"""``weft top`` in a real terminal: it fills the screen, follows what changes, and leaves it as it was, in both ways."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console
from sqlalchemy import update

from api.admin.overview import Overview
from cli.top_view import frame
from cli.top_watch import Interrupt
from contracts.operations import OptimStepped
from store.clock import utc_now
from store.tables import Operation
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant
from tests.other_versions import Version, admin_service

SECONDS = 60.0


class Screen:
    """A command in a pseudo-terminal, and all that it has written."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.written = b""
        self._terminal = terminal
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._terminal, 65536)
            except OSError:
                return
            if not piece:
                return
            self.written += piece

    def text(self) -> str:
        """Everything written, without colours and movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode(errors="replace"))

    async def until(self, *words: str, since: int = 0) -> str:
        """Wait until all the words were written after the first ``since`` characters."""
        deadline = time.monotonic() + SECONDS
        while not all(word in self.text()[since:] for word in words):
            assert time.monotonic() < deadline, self.text()
            assert self.process.poll() is None, self.text()
            await asyncio.sleep(0.02)
        return self.text()


@contextmanager
def terminal(
    arguments: list[str], environment: dict[str, str], *, columns: int = 100, lines: int = 30
) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    command = [sys.executable, "-m", "cli.main", *arguments]
    cleaned = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**cleaned, "TERM": "xterm-256color", **environment}
    )
    os.close(theirs)
    screen = Screen(process, ours)
    try:
        yield screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("way", ["http", "data"])
async def test_top_follows_tenants_queue_and_processes(admin: Admin, cats: Tenant, dogs: Tenant, way: str) -> None:
    run = await cats.run()
    for seq_id in range(1, 4):
        await cats.operation(run, seq_id)
    environment = {"WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret} if way == "http" else {}
    data = [] if way == "http" else ["--data", str(admin.data)]
    with terminal(["top", "--interval", "0.2", *data], environment) as screen:
        seen = await screen.until("tokens/s", "cats", "optim_step", "cats 100%", "works", "no trainer")
        assert "dogs" not in seen
        await dogs.operation(await dogs.run())
        await screen.until("dogs", "cats 75%, dogs 25%", since=len(seen))
        screen.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(screen.process.wait, SECONDS) == 0
    # The screen that was there before comes back.
    assert b"\x1b[?1049h" in screen.written
    assert b"\x1b[?1049l" in screen.written


async def test_top_keeps_the_last_look_while_it_cannot_read_what_a_newer_service_answers() -> None:
    with admin_service() as service:
        environment = {"WEFT_ADMIN_URL": service.url, "WEFT_ADMIN_KEY": "tml-key"}
        with terminal(["top", "--interval", "0.2"], environment, columns=240) as screen:
            seen = await screen.until("tokens/s", "hold")
            service.version = Version.NEWER
            seen = await screen.until("a_word_more", since=len(seen))
            service.without.add("window_seconds")
            await screen.until("another version", "this is the last look", since=len(seen))
            screen.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(screen.process.wait, SECONDS) == 0


def test_ctrl_c_in_a_finalizer_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised there."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.has_come
        Dying()
        assert (dropped, interrupt.has_come) == ([KeyboardInterrupt], True)
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_tenant_that_had_no_tokens_and_has_no_work_is_due_nothing(
    admin: Admin, cats: Tenant, dogs: Tenant, new_tenant: Callable[[str], Awaitable[Tenant]]
) -> None:
    """A name beside those that work would look as if its tenant were starved of half of the service. No number is cut."""
    lanes = {}
    for tenant in (cats, dogs, await new_tenant("birds")):
        lanes[tenant.id] = await tenant.run()
        await tenant.operation(lanes[tenant.id], 1)
    await cats.service.run_next(OptimStepped({}))
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(Operation).values(finished_at=utc_now()))
        mine = update(Operation).where(Operation.tenant_id == cats.id)
        await transaction.execute(mine.values(tokens=100))
    await dogs.operation(lanes[dogs.id], 2)
    seen = Overview.model_validate((await admin.http.get("/overview")).json())
    assert {one.name: one.entitled_share for one in seen.tenants} == {"cats": 0.5, "dogs": 0.5}
    for columns in (60, 100):
        console = Console(width=columns, file=StringIO(), record=True)
        console.print(frame(seen, rows=3))
        assert "100%   50%" in console.export_text()
