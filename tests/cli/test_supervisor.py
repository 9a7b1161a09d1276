"""The supervisor passes on what its children print, and keeps them running."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import cli.supervisor
from cli.supervisor import READY_PREFIX, Child, Supervisor

DEADLINE_SECONDS = 30
LONG = 2**21
WAIT = "import signal; signal.pause()"


def child(label: str, *prints: str) -> Child:
    """A child that prints and then waits for its end."""
    lines = "; ".join(f"print({text}, flush=True)" for text in (*prints, repr(f"{READY_PREFIX} {label}")))
    return Child(label, (sys.executable, "-c", f"{lines}; {WAIT}"))


async def ignored(_: int) -> None:
    """Do nothing about an ended child."""


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    """Run the supervisor for the block, which has to end in time."""
    task = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield task
    finally:
        supervisor.stop()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("more", [0, 1, 12_345])
async def test_a_very_long_line_comes_in_parts_and_its_child_goes_on(
    capfd: pytest.CaptureFixture[str], more: int
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
    lines = capfd.readouterr().out.splitlines()
    said = [line.removeprefix("long   | ") for line in lines if line.startswith("long ")]
    assert sum(part.count("x") for part in said) == LONG + more
    assert said[-2:] == ["after", f"{READY_PREFIX} long"]
    assert [line for line in lines if line.startswith("beside")] == [
        "beside | hello",
        f"beside | {READY_PREFIX} beside",
    ]


async def test_a_full_disk_under_standard_output_drops_lines_and_stops_no_child(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    talks = f"""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
open({str(pid)!r}, "w").write(str(os.getpid()))
for _ in range(3000):
    print("x" * 1000)
print("{READY_PREFIX}", flush=True)
signal.sigwait([signal.SIGUSR1])
print("after")
"""
    ended = asyncio.Event()

    async def note(_: int) -> None:
        ended.set()

    supervisor = Supervisor([Child("talks", (sys.executable, "-c", talks)), child("beside")], note)
    with os.fdopen(os.open("/dev/full", os.O_WRONLY), "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        async with running(supervisor) as task:
            # The child has written more than its pipe holds: its lines were read.
            await supervisor.wait_ready()
            patched.undo()
            os.kill(int(pid.read_text()), signal.SIGUSR1)
            await ended.wait()
            assert not task.done()
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines[:2] == ["3002 lines could not be printed", "talks  | after"]
    assert not any("could not be printed" in line for line in lines[2:])


async def test_a_reader_of_standard_output_that_is_gone_stops_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        supervisor = Supervisor([child("one"), child("other")], ignored)
        async with running(supervisor) as task:
            await supervisor.wait_ready()
            assert not task.done()


async def test_a_child_that_cannot_be_started_is_tried_again_and_others_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = asyncio.create_subprocess_exec, ["late"]

    async def out_of_descriptors(*command: str, **options: object) -> asyncio.subprocess.Process:
        if refused and refused[0] in command[-1]:
            refused.pop()
            raise OSError(24, "Too many open files")
        return await start(*command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", out_of_descriptors)
    supervisor = Supervisor([child("late"), child("beside")], ignored)
    async with running(supervisor) as task:
        await supervisor.wait_ready()
        assert not refused
        assert not task.done()


async def test_a_child_is_started_again_though_its_end_could_not_be_told(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    dies = f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')"
    told = asyncio.Queue[int]()

    async def fails(pid: int) -> None:
        told.put_nowait(pid)
        raise RuntimeError("no database")

    async with running(Supervisor([Child("dies", (sys.executable, "-c", dies))], fails)) as task:
        first, second = await told.get(), await told.get()
        assert [int(line) for line in pids.read_text().splitlines()[:2]] == [first, second]
        assert not task.done()


async def test_a_child_that_is_being_started_at_the_stop_ends_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()
    supervisor = Supervisor([child("late"), child("beside")], ignored)

    async def stopped_meanwhile(*command: str, **options: object) -> asyncio.subprocess.Process:
        process = await start(*command, **options)  # type: ignore[arg-type]
        started.append(process)
        if "late" in command[-1]:
            supervisor.stop()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stopped_meanwhile)
    async with running(supervisor) as task:
        await task
    assert [process.returncode for process in started] == [-signal.SIGTERM] * len(started)


async def test_a_frozen_child_is_killed_and_started_again_and_one_that_lives_is_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither is one that is not ready yet, nor one that gives no signs."""
    monkeypatch.setattr(cli.supervisor, "_SILENT_SECONDS", 2.0)
    beats = f"""
import asyncio, os, sys
from pathlib import Path
from cli.liveness import signs_of_life
async def main():
    async with signs_of_life():
        Path(sys.argv[1]).write_text(str(os.getpid()))
        print("{READY_PREFIX}", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    ended = asyncio.Queue[int]()

    async def note(pid: int) -> None:
        ended.put_nowait(pid)

    def beating(label: str) -> Child:
        return Child(label, (sys.executable, "-c", beats, str(tmp_path / label)), gives_signs=True)

    starts = Child("starts", (sys.executable, "-c", WAIT), gives_signs=True)
    supervisor = Supervisor([beating("frozen"), beating("lives"), starts, child("silent")], note)
    async with running(supervisor):
        ready = [tmp_path / "frozen", tmp_path / "lives"]
        while not all(one.exists() and one.read_text() for one in ready):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        frozen = int(ready[0].read_text())
        os.kill(frozen, signal.SIGSTOP)
        assert await ended.get() == frozen
        while int(ready[0].read_text() or frozen) == frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert ended.empty()
    assert "frozen | gave no sign of life for 2 s and is killed" in capfd.readouterr().out


async def test_logs_in_json_go_to_standard_error_one_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    logged, broken = {"level": "info", "message": "é"}, "{ no object"
    talks = child("talks", repr(json.dumps(logged)), repr(broken)), child("beside", "'hello'")
    supervisor = Supervisor(talks, ignored, logs_json=True)
    async with running(supervisor):
        await supervisor.wait_ready()
    shown = capfd.readouterr()
    assert [json.loads(line) for line in shown.err.splitlines()] == [{**logged, "child": "talks"}]
    assert f"talks  | {broken}" in shown.out.splitlines()
    assert "beside | hello" in shown.out.splitlines()


async def test_a_child_whose_own_process_holds_its_output_open_is_started_again_and_keeps_no_stop_waiting(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The process stands for a worker's own that waits for a disk."""
    pids = tmp_path / "pids"
    holds = f"""
import subprocess
print(subprocess.Popen(["sleep", "60"]).pid, file=open({str(pids)!r}, "a"))
for number in range(500):
    print("line", number)
print("{READY_PREFIX}", flush=True)
"""
    ends = asyncio.Queue[int]()

    async def note(pid: int) -> None:
        ends.put_nowait(pid)

    supervisor = Supervisor([Child("holds", (sys.executable, "-c", holds)), child("beside")], note)
    try:
        async with running(supervisor) as task:
            assert await ends.get() != await ends.get()
            supervisor.stop()
            await task
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    said = [line.removeprefix("holds  | ") for line in capfd.readouterr().out.splitlines() if line.startswith("holds")]
    assert said.count("line 499") >= 2
    assert said[:502] == [
        *(f"line {number}" for number in range(500)),
        READY_PREFIX,
        "ended with status 0; starting it again",
    ]
