"""Methods of the operators' client, by the names of the functions of the admin API that answer them."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from weft_client.admin_async import AsyncWeftAdmin
from weft_client.call import Call

from tests.clients.noted_calls import call_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
METHODS: dict[str, Callable[[AsyncWeftAdmin], Any]] = {
    "list_tenants": lambda weft: weft.tenants.list(name="cats"),
    "list_shares": lambda weft: weft.tenants.shares(),
    "make_tenant": lambda weft: weft.tenants.create("cats"),
    "show_tenant": lambda weft: weft.tenants.get("t"),
    "change_tenant": lambda weft: weft.tenants.change("t", limits={"sessions": None}, share=1.0, if_match="1"),
    "suspend": lambda weft: weft.tenants.suspend("t", mode="hold", reason="x"),
    "resume": lambda weft: weft.tenants.resume("t"),
    "show_standing": lambda weft: weft.tenants.standing("t"),
    "change_budget": lambda weft: weft.tenants.set_budget("t", "day", 7, key="tml-1"),
    "mark": lambda weft: weft.tenants.delete("t", grace_seconds=1),
    "unmark": lambda weft: weft.tenants.restore("t"),
    "list_keys": lambda weft: weft.keys.list(tenant="t", prefix="tml-1"),
    "make_key": lambda weft: weft.keys.create("t", scopes=["train"], expires_at=NOW),
    "rotate": lambda weft: weft.keys.rotate(1, grace=0),
    "change_key_limits": lambda weft: weft.keys.bound(1, {"train_tokens_per_minute": 1}),
    "revoke": lambda weft: weft.keys.revoke(1),
    "list_tenants_projects": lambda weft: weft.projects.list("t"),
    "make_project": lambda weft: weft.projects.create("t", "one"),
    "change_project_limits": lambda weft: weft.projects.bound("t", "one", {"sessions": 1}),
    "list_prices": lambda weft: weft.prices.list(),
    "list_tenants_prices": lambda weft: weft.prices.list(tenant="t"),
    "make_tenants_price": lambda weft: weft.prices.add("train_tokens", Decimal("0.1"), tenant="t"),
    "make_price": lambda weft: weft.prices.add("storage", Decimal("0.1"), base_model="b", valid_from=NOW),
    "list_all_alerts": lambda weft: weft.alerts.list(tenant="t"),
    "list_usage": lambda weft: weft.usage.list(days=1, tenant="cats"),
    "verify_usage": lambda weft: weft.usage.verify(NOW.date()),
    "read_tenants_usage": lambda weft: weft.usage.of_tenant("t", since=NOW, before=NOW, group_by=["key"]),
    "export_tenants_usage": lambda weft: weft.usage.export("t", since=NOW, before=NOW),
    "list_all_checkpoints": lambda weft: weft.checkpoints.list(tenant="t", run="r", expires_within=1),
    "show_checkpoint": lambda weft: weft.checkpoints.get("tinker://s:train:0/weights/one"),
    "remove_checkpoint": lambda weft: weft.checkpoints.delete("tinker://s:train:0/weights/one"),
    "list_bases": lambda weft: weft.bases.list(),
    "accept_base": lambda weft: weft.bases.accept("org/base", "0" * 64),
    "verify_audit": lambda weft: weft.audit.verify(),
    "list_entries": lambda weft: weft.audit.entries(
        tenant="t", action=["key_create"], resource=["key"], key="tml-1", since=NOW, until=NOW
    ),
    "list_runs": lambda weft: weft.runs.list(tenant="t", base_model="b", trainer="w", state="ready"),
    "show_run": lambda weft: weft.runs.get("r", events=1),
    "move_run": lambda weft: weft.runs.move("r", to="w", reason="x"),
    "weigh": lambda weft: weft.runs.weigh("r", 3.0),
    "evict_run": lambda weft: weft.runs.evict("r", reason="x"),
    "list_sessions": lambda weft: weft.sessions.list(tenant="t", is_open=True),
    "show_session": lambda weft: weft.sessions.get("s"),
    "end_session": lambda weft: weft.sessions.end("s", reason="x"),
    "list_all_operations": lambda weft: weft.operations.list(tenant="cats", lane="l", kind="sample"),
    "show_operation": lambda weft: weft.operations.get("o"),
    "cancel_operation": lambda weft: weft.operations.cancel("o", reason="x"),
    "fail_operation": lambda weft: weft.operations.fail("o", reason="x"),
    "requeue": lambda weft: weft.operations.requeue("o"),
    "list_gates": lambda weft: weft.gates.list(base_model="b"),
    "show_gate": lambda weft: weft.gates.get("pool", "org/base"),
    "pause": lambda weft: weft.gates.pause("pool", "b", ttl_seconds=1.0),
    "resume_gate": lambda weft: weft.gates.resume("pool", "b"),
    "list_all_replicas": lambda weft: weft.replicas.list(base_model="b"),
    "direct": lambda weft: weft.replicas.direct("0", "drain", base_model="b"),
    "work": lambda weft: weft.replicas.work("0", base_model="b"),
    "list_all_trainers": lambda weft: weft.trainers.list(),
    "drain": lambda weft: weft.trainers.drain("w", reason="x"),
    "undrain": lambda weft: weft.trainers.work("w"),
    "list_all_pools": lambda weft: weft.pools.list(),
    "list_all_apis": lambda weft: weft.apis.list(),
    "list_ended_processes": lambda weft: weft.ended_processes.list(),
    "show_queue": lambda weft: weft.queue.lines(),
    "list_placements": lambda weft: weft.queue.placements(base_model="b"),
    "show_housekeeping": lambda weft: weft.housekeeping.steps(),
    "run_housekeeping": lambda weft: weft.housekeeping.run("expire-links"),
    "list_tenants_webhooks": lambda weft: weft.webhooks.list("t"),
    "set_webhook": lambda weft: weft.webhooks.set(
        "t", "one", "https://a.example", events=["*"], note="x", is_enabled=True
    ),
    "delete_webhook": lambda weft: weft.webhooks.delete("t", "one"),
    "read_secret": lambda weft: weft.webhooks.secret("t", "one"),
    "rotate_secret": lambda weft: weft.webhooks.rotate("t", "one"),
    "send_test": lambda weft: weft.webhooks.test("t", "one"),
    "list_events": lambda weft: weft.webhooks.events("t", "one"),
    "retry_event": lambda weft: weft.webhooks.retry("t", "one", "event"),
    "show_overview": lambda weft: weft.overview(window_seconds=1),
}


async def admins_call(name: str) -> Call[Any]:
    """Return the request of a method."""
    return await call_of(AsyncWeftAdmin, METHODS[name])
