"""The overview tells in figures what a tenant has in hand and what went wrong for it, and nothing of another tenant's."""

import math
import re

from api.dashboard.rendering import measured
from contracts.errors import InvalidRequest
from tenants.sessions import end_silent_sessions
from tests.api.dashboard.visits import visitor
from tests.api.test_joint_polls import open_sampler, sample
from tests.api.test_points import steps

_FIGURE = re.compile(r'<li data-figure="(\w+)"><b>([^<]*)</b><span>([^<]*)</span>')
_FAILURE = re.compile(r'<tr data-failed="(\w+)"[^>]*>.*?<span class="badge badge-bad">([^<]*)</span>')

_RUN = re.compile(
    r'<tr data-run="([^"]+)".*?<td class="number">\d+</td><td class="number">([^<]*)</td>'
    r'.*?<svg [^>]*role="img"[^>]*><title>([^<]*)</title><path d="([^"]*)"'
)


async def test_samples_are_counted_beside_the_operations_and_not_among_them(service, cats, dogs) -> None:
    run, sampler = await cats.run(), await open_sampler(cats)
    for seq_id in (1, 2, 3):
        await cats.operation(run, seq_id)
    for seq_id in (0, 1):
        await sample(cats, sampler, seq_id)
    await sample(dogs, await open_sampler(dogs), 0)
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        own = {found[1]: (found[2], found[3]) for found in _FIGURE.finditer((await http.get("/ui")).text)}
        theirs = {
            found[1]: (found[2], found[3]) for found in _FIGURE.finditer((await other.get("/ui/parts/overview")).text)
        }
    assert own["pending_operations"] == ("3", "operations pending")
    assert own["pending_samples"] == ("2", "samples pending")
    assert theirs["pending_operations"] == ("0", "operations pending")
    assert theirs["pending_samples"] == ("1", "sample pending")


async def test_a_loss_that_is_not_finite_is_a_gap_and_never_the_one_before_it(service, cats, dogs) -> None:
    runs = [await cats.run(), await cats.run()]
    await steps(cats, runs[0], [8.0, 6.0, math.nan, 4.0, 2.0])
    await steps(cats, runs[1], [8.0, 6.0, math.nan])
    theirs = await dogs.run()
    await steps(dogs, theirs, [8.0, 6.0])
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        told, beside = (await http.get("/ui")).text, (await other.get("/ui")).text
    found = {run: shown for run, *shown in _RUN.findall(told)}
    loss, label, path = found[runs[0]]
    assert (loss, path.count("M"), path.count("L")) == (measured(1.0), 2, 2)
    assert label == "Mean loss of the last 5 steps; at the last: 1"
    loss, label, path = found[runs[1]]
    assert (loss, path.count("M"), path.count("L")) == ("–", 1, 1)
    assert label == "Mean loss of the last 3 steps; at the last: none"
    (shown,) = _RUN.findall(beside)
    assert shown[:3] == (theirs, measured(3.0), "Mean loss of the last 2 steps; at the last: 3")


async def test_a_sparkline_of_a_single_step_says_that_there_is_no_curve_yet(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    await steps(cats, run, [8.0])
    await steps(dogs, theirs, [8.0, 6.0])
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        told = [_RUN.findall((await one.get("/ui/parts/overview")).text) for one in (http, other)]
    assert told[0] == [(run, measured(4.0), "Mean loss: no curve yet", "")]
    assert [label for _, _, label, _ in told[1]] == ["Mean loss of the last 2 steps; at the last: 3"]


async def test_failed_operations_dead_scripts_and_lost_sessions_of_a_day_are_told_newest_first(
    service, cats, dogs
) -> None:
    run, silent, old = await cats.run(), await cats.session(), await cats.session()
    await _die(cats, old, "OldError")
    service.clock.move(hours=23)
    await cats.operation(run)
    await service.run_next(InvalidRequest("no such loss"))
    service.clock.move(hours=2)
    await _die(cats, silent, "ValueError")
    async with service.database.write() as transaction:
        ended = await end_silent_sessions(transaction, silent_since=service.clock(), now=service.clock(), most=10)
    assert ended >= 2
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        told, theirs = (await http.get("/ui")).text, (await other.get("/ui")).text
    shown = _FAILURE.findall(told)
    assert shown[-1] == ("optim_step", "invalid_request")
    assert sorted(shown[:-1]) == [("script", "ValueError"), *[("session", "lost")] * (len(shown) - 2)]
    assert all(word in told for word in ("no such loss", "x must not be 3", f"the heartbeats of {silent} stopped"))
    assert "OldError" not in told
    assert _FAILURE.findall(theirs) == []


async def _die(tenant, session: str, name: str) -> None:
    """Have the SDK tell what a script died of."""
    event = {"event": "UNHANDLED_EXCEPTION", "event_id": name, "error_type": name, "traceback": "t"}
    told = {
        "session_id": session,
        "platform": "p",
        "sdk_version": "s",
        "events": [event | {"error_message": "x must not be 3"}],
    }
    (await tenant.http.post("/telemetry", json=told)).raise_for_status()
