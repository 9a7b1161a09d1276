"""Light requests under load: ``/healthz`` and heartbeats at a steady rate, from a process of their own.

A probe's time runs from the moment it was due, so that a probe that waits for its turn counts as slow, not as absent.
Probes use several kept connections in turn. The API processes share one port, and each connection stays with one process.
"""

import asyncio
from dataclasses import asdict, dataclass, field
from time import monotonic

import aiohttp
import orjson
import uvloop

from bench.processes.json_process import give_answer, given_task

CONNECTIONS = 8
"""Connections of each kind of probe."""
_TIMEOUT_SECONDS = 30.0


@dataclass(slots=True)
class Probes:
    """Probes of one kind, as (due, seconds until the answer). ``due`` is in seconds of ``time.monotonic``.

    A probe without a status of 200 is in ``failed``.
    """

    answered: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Task: probe until ``ends`` (seconds of ``time.monotonic``), with ``per_second`` probes of each kind in a second."""

    base_url: str
    key: str
    session_id: str
    ends: float
    per_second: float


async def probe(task: ProbeTask) -> dict[str, Probes]:
    """Send both kinds of probes side by side. ``lateness``: seconds by which this process itself was woken too late."""
    beat = orjson.dumps({"session_id": task.session_id})
    found = {kind: Probes() for kind in ("healthz", "heartbeat", "lateness")}
    await asyncio.gather(
        _steadily(task, "GET", "/healthz", None, found["healthz"], found["lateness"]),
        _steadily(task, "POST", "/api/v1/session_heartbeat", beat, found["heartbeat"], found["lateness"]),
    )
    return found


async def _steadily(
    task: ProbeTask, method: str, path: str, body: bytes | None, found: Probes, lateness: Probes
) -> None:
    headers = {"X-API-Key": task.key, "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    sessions = [
        aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        for _ in range(CONNECTIONS)
    ]

    async def once(session: aiohttp.ClientSession, due: float) -> None:
        try:
            async with session.request(method, task.base_url + path, data=body) as answer:
                text = await answer.text()
            if answer.status == 200:
                found.answered.append((due, monotonic() - due))
            else:
                found.failed.append(f"{path} answered {answer.status}: {text[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            found.failed.append(f"{path}: {error!r}")

    due, number = monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while due < task.ends:
            await asyncio.sleep(max(0.0, due - monotonic()))
            lateness.answered.append((due, monotonic() - due))
            group.create_task(once(sessions[number % CONNECTIONS], due))
            due, number = due + 1.0 / task.per_second, number + 1
    for session in sessions:
        await session.close()


def main() -> None:
    """Read the task, probe, and write the outcome."""
    found = uvloop.run(probe(ProbeTask(**given_task())))
    give_answer({kind: asdict(probes) for kind, probes in found.items()})


if __name__ == "__main__":
    main()
