"""A supervisor of child processes: merges their logs under labels, restarts each child that ends, and stops all at the end."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import orjson

from cli.liveness import DESCRIPTOR, LivenessPipe
from cli.output_pipe import OutputPipe
from cli.standard_output import DroppedLines
from store.repeat import repeat

READY_PREFIX = "ready;"
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0
"""Life of a child after which its next restart waits for the shortest pause again."""
_STOP_SECONDS = 60.0
"""Time that a trainer may need to end its pass and write its snapshots."""
_SILENT_SECONDS = 30.0
"""Time without a sign of life after which a child that was ready is killed. Its leases have ended long before."""
_LAST_LINES_SECONDS = 1.0
"""Time in which the last lines of a child that has ended are read."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A command to keep running. ``label`` stands before each line it prints; ``niceness`` is added to the supervisor's.

    One that ``gives_signs`` of life is killed when none has come for long after it was ready; see ``cli.liveness``.
    """

    label: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    gives_signs: bool = False


class Supervisor:
    """Supervisor of ``children`` until ``stop``."""

    def __init__(
        self, children: Sequence[Child], on_end: Callable[[int], Awaitable[None]], *, logs_json: bool = False
    ) -> None:
        """``on_end`` is called with the pid of every child that ends by itself, before it is started again.

        With ``logs_json`` the children's logs are JSON: they go to standard error, with the label as a field.
        """
        self._logs_json = logs_json
        self._children = children
        self._on_end = on_end
        self._width = max(len(child.label) for child in children)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._output = DroppedLines()
        self._not_ready = {child.label for child in children}
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keep the children running until ``stop``, then wait until every child has ended."""
        await asyncio.gather(*(self._keep(child) for child in self._children))

    async def wait_ready(self) -> None:
        """Return once every child has printed that it is ready."""
        await self._all_ready.wait()

    def stop(self) -> None:
        """Ask every child to end, and start none again."""
        self._stopping.set()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.terminate()

    async def _keep(self, child: Child) -> None:
        pauses = _Pauses()
        await repeat(
            partial(self._run_once, child, pauses),
            seconds=pauses.next,
            failed=f"{child.label} could not be kept running",
            stopping=self._stopping,
        )

    async def _run_once(self, child: Child, pauses: "_Pauses") -> None:
        """Start the child and wait until it has ended. It has ended also when this raises."""
        pauses.began()
        with closing(LivenessPipe()) as pipe, closing(OutputPipe()) as output:
            process = await self._start(child, pipe, output)
            try:
                status = await self._ended(child, process, pipe, output)
            finally:
                self._processes.pop(child.label, None)
                if process.returncode is None:
                    process.kill()
        if not self._stopping.is_set():
            self._print(child, f"ended with status {status}; starting it again")
            await self._on_end(process.pid)

    async def _start(self, child: Child, pipe: LivenessPipe, output: OutputPipe) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.writing,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **child.environment, **({DESCRIPTOR: str(pipe.writing)} if child.gives_signs else {})},
            pass_fds=(pipe.writing,) if child.gives_signs else (),
            preexec_fn=partial(_prepare, child.niceness),
        )
        pipe.started()
        output.started()
        self._processes[child.label] = process
        if self._stopping.is_set():
            # ``stop`` came during the start and did not know the process yet.
            with suppress(ProcessLookupError):
                process.terminate()
        return process

    async def _ended(
        self, child: Child, process: asyncio.subprocess.Process, pipe: LivenessPipe, output: OutputPipe
    ) -> int:
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(child, output, ready))
            watching = tasks.create_task(self._watch(child, process, pipe, ready))
            waiting = tasks.create_task(process.wait())
            stopping = tasks.create_task(self._stopping.wait())
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.wait([waiting], timeout=_STOP_SECONDS)
            if not waiting.done():
                self._print(child, f"did not end in {_STOP_SECONDS:.0f} s and is killed")
                process.kill()
            stopping.cancel()
            watching.cancel()
            status = await waiting
            # The child's own processes hold its output open: one that a disk holds up would keep the child from its next start.
            await asyncio.wait([reading], timeout=_LAST_LINES_SECONDS)
            reading.cancel()
            return status

    async def _watch(
        self, child: Child, process: asyncio.subprocess.Process, pipe: LivenessPipe, ready: asyncio.Event
    ) -> None:
        """Kill the child once it is silent. A start may take minutes: nobody is watched before it is ready."""
        if child.gives_signs:
            await ready.wait()
            await pipe.until_silent(_SILENT_SECONDS)
            self._print(child, f"gave no sign of life for {_SILENT_SECONDS:.0f} s and is killed")
            with suppress(ProcessLookupError):
                process.kill()

    async def _read(self, child: Child, output: OutputPipe, ready: asyncio.Event) -> None:
        async for line in output.lines():
            text = line.decode(errors="replace").rstrip()
            if not (self._logs_json and _log_json(child, text)):
                self._print(child, text)
            if text.startswith(READY_PREFIX):
                ready.set()
                self._not_ready.discard(child.label)
                if not self._not_ready:
                    self._all_ready.set()

    def _print(self, child: Child, text: str) -> None:
        self._output.print(f"{child.label:<{self._width}} | {text}")


class _Pauses:
    """Pauses before the starts of one child: each twice as long as the last one, until the child has lived long."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = monotonic()

    def began(self) -> None:
        """Note that the child is started."""
        self._began = monotonic()

    def next(self) -> float:
        """Return the pause before the next start."""
        has_lived_long = monotonic() - self._began > _HEALTHY_SECONDS
        longer = min(2 * self._seconds, _LONGEST_PAUSE_SECONDS)
        self._seconds = _FIRST_PAUSE_SECONDS if has_lived_long else max(_FIRST_PAUSE_SECONDS, longer)
        return self._seconds


def _log_json(child: Child, text: str) -> bool:
    """Write a child's log line to standard error, where this process's own are, and return whether ``text`` is one."""
    if not text.startswith("{"):
        return False
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    with suppress(OSError):
        sys.stderr.write(orjson.dumps({**fields, "child": child.label}).decode() + "\n")
        sys.stderr.flush()
    return True


def _prepare(niceness: int) -> None:
    """Prepare the child's process before it runs. On Linux the child ends when its supervisor is killed."""
    os.nice(niceness)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
