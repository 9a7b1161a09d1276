"""Methods of the tenant's client, each with arguments for all that it may send."""

from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from weft_client.asynchronous import AsyncWeft
from weft_client.call import Call

from tests.clients.noted_calls import call_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def given(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a method."""
    return args, named


METHODS = {
    "runs.page": given(
        project_id="one", base_model="b", state="ready", text="x", metadata="a=b", recent=1, limit=1, cursor="1-1"
    ),
    "runs.get": given("run", recent=1),
    "runs.weigh": given("run", 3.0),
    "runs.marks": given("run"),
    "runs.points": given("run", after=1, limit=1),
    "runs.waiting": given("run"),
    "runs.add_metrics": given("run", {1: {"reward": 1.0}}),
    "runs.metric": given("run", "reward", after=1, limit=1),
    "gates.state": given("run"),
    "gates.list": given(),
    "gates.pause": given("run", mode="keep", reason="x", ttl=1.0, wait_seconds=1.0, clear_cache=True, generation=1),
    "gates.resume": given("run", generation=1),
    "gates.reload": given("run", path="tinker://run/sampler_weights/one"),
    "samples.stream": given("sampler", [1], seq_id=1, num_samples=1, max_tokens=1, temperature=0.0, seed=1, stop=[2]),
    "samples.finished": given(),
    "samples.report": given("request"),
    "samples.waiting": given("request"),
    "samples.staleness": given("sampler"),
    "samples.bound_staleness": given("sampler", max_version_lag=1, on_stale="fail", swap_policy="finish"),
    "operations.list": given(state="pending", lane="run", kind="sample"),
    "exceptions.list": given(session="one", run="run"),
    "usage.query": given(since=NOW, before=NOW, group_by=["run"], bucket_width="1h"),
    "usage.export": given(since=NOW, before=NOW, format="focus"),
    "usage.standing": given(),
    "audit.entries": given(action=["key_create"], resource=["key"], key="tml-1", since=NOW, until=NOW),
    "keys.list": given(),
    "keys.create": given(
        note="x",
        scopes=["train"],
        projects=["one"],
        expires_at=NOW,
        base_models=["b"],
        max_rank=1,
        networks=[],
        limits={},
    ),
    "keys.rotate": given(1, grace=0),
    "keys.bound": given(1, {"train_tokens_per_minute": 1}),
    "keys.revoke": given(1),
    "projects.list": given(),
    "projects.create": given("one"),
    "projects.bound": given("one", {"sessions": 1}),
    "webhooks.list": given(),
    "webhooks.set": given("one", "https://a.example", events=["*"], note="", is_enabled=True),
    "webhooks.delete": given("one"),
    "webhooks.secret": given("one"),
    "webhooks.rotate": given("one"),
    "webhooks.test": given("one"),
    "webhooks.events": given("one"),
    "webhooks.retry": given("one", "event"),
    "checkpoints.list": given(run="run", type="sampler", name="one", public=True, expires_within=1),
    "checkpoints.delete": given(["tinker://run/weights/one"]),
    "jobs.merge": given("tinker://run/weights/one", "merged", ttl_seconds=1, dtype="bfloat16"),
    "jobs.import_archive": given(
        b"", base_model="base", name="one", segment="weights", ttl_seconds=1, project="one", offset=1
    ),
    "jobs.received": given("one"),
    "jobs.list": given(limit=1),
    "jobs.get": given("job"),
    "jobs.cancel": given("job"),
}
"""Each method that sends a request of its own, with arguments for all that it may send."""


async def tenants_call(name: str, *, pages: int = 0) -> Call[Any]:
    """Return the request of a method, of a list that behind so many pages."""
    args, named = METHODS[name]
    return await call_of(AsyncWeft, lambda weft: attrgetter(name)(weft)(*args, **named), pages=pages)
