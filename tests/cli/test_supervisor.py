"""The supervisor passes on what its children print."""

import asyncio
import sys

import pytest

from cli.supervisor import READY_PREFIX, Child, Supervisor

DEADLINE_SECONDS = 60
LONG = 2**21
WAIT = "import signal; signal.pause()"


def child(label: str, *prints: str) -> Child:
    """A child that prints and then waits for its end."""
    lines = "; ".join(f"print({text}, flush=True)" for text in (*prints, repr(f"{READY_PREFIX} {label}")))
    return Child(label, (sys.executable, "-c", f"{lines}; {WAIT}"))


async def ignored(_: int) -> None:
    """Do nothing about an ended child."""


@pytest.mark.parametrize("more", [0, 1, 12_345])
async def test_a_very_long_line_comes_in_parts_and_its_child_goes_on(
    capsys: pytest.CaptureFixture[str], more: int
) -> None:
    children = child("long", f"'x' * {LONG + more}", "'after'"), child("beside", "'hello'")
    supervisor = Supervisor(children, ignored)
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await supervisor.wait_ready()
    finally:
        supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)
    lines = capsys.readouterr().out.splitlines()
    said = [line.removeprefix("long   | ") for line in lines if line.startswith("long ")]
    assert sum(part.count("x") for part in said) == LONG + more
    assert said[-2:] == ["after", f"{READY_PREFIX} long"]
    assert [line for line in lines if line.startswith("beside")] == [
        "beside | hello",
        f"beside | {READY_PREFIX} beside",
    ]
