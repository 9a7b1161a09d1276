"""Attacks by long reads and by rows that are kept: lists, searches, usage, metrics of the user's own (A5)."""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import orjson

from bench.hostile.foothold import OWN_PREFIX, PREFIX, Foothold, again_and_again

_CONNECTIONS = 32
_SESSIONS = 200
_RUNS = 4
_STEPS = 20
_METRICS = 50
"""Metrics of a step."""


async def searches_and_lists(foothold: Foothold) -> None:
    """Search sessions that never match, read lists at their deepest pages, and ask for two weeks of usage by the hour."""
    for number in range(_SESSIONS):
        status, content = await foothold.post("create_session", {"user_metadata": {"note": f"{number}"}})
        if status == 200:
            foothold.further_sessions.append(orjson.loads(content)["session_id"])
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = urlencode({"starting_on": (end - timedelta(days=14)).isoformat(), "ending_before": end.isoformat()})
    deep = urlencode({"limit": 1000, "offset": 99_000})
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "sessions/search", {"display_name": "none", "user_metadata": {"note": "none"}, "limit": 200}),
        ("GET", f"sessions?{deep}", None),
        ("GET", f"training_runs?{deep}", None),
        ("GET", f"checkpoints?{deep}", None),
        ("GET", f"billing/usage/events?{window}", None),
        ("GET", "billing/usage/checkpoints/current", None),
        ("GET", "audit?limit=1000", None),
    ]

    async def send(number: int) -> None:
        method, endpoint, body = asked[number % len(asked)]
        await foothold.send(method, f"{PREFIX}/{endpoint}", None if body is None else orjson.dumps(body))

    await again_and_again(_CONNECTIONS, send)


async def own_metrics(foothold: Foothold) -> None:
    """Record metrics of the user's own, each value at a step of its own, and read them back."""
    runs = [await foothold.run(rank=1) for _ in range(_RUNS)]

    async def send(number: int) -> None:
        run, first = runs[number % _RUNS], number * _STEPS
        if number % 8 == 7:
            await foothold.send("GET", f"{OWN_PREFIX}/runs/{run}/points?limit=2000")
            return
        metrics = {f"metric_{place}": float(number) for place in range(_METRICS)}
        points = [{"step": step, "metrics": metrics} for step in range(first, first + _STEPS)]
        await foothold.send("POST", f"{OWN_PREFIX}/runs/{run}/points", orjson.dumps({"points": points}))

    await again_and_again(_CONNECTIONS, send)
