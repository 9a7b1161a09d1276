"""Every admin route has a command, and each command says the same over HTTP and on the database, as text and as JSON."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from cli.main import app
from contracts.operations import OperationKind
from contracts.paths import Segment
from store.clock import utc_now
from store.settings import Settings
from store.tables import BudgetAlert, Placement, UsageHour, Webhook, WorkerProcess
from tenants.ended_processes import note_ended
from tenants.keys import create_key
from tenants.limits import Limits
from tenants.webhooks import WebhookSpec, send_test, set_webhook
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE, Tenant

READS = (
    ("tenant", "list"),
    ("tenant", "show", "{tenant}"),
    ("tenant", "limits", "{tenant}"),
    ("tenant", "shares"),
    ("tenant", "usage", "--tenant", "{tenant}"),
    ("key", "list", "--tenant", "{tenant}"),
    ("project", "list", "--tenant", "{tenant}"),
    ("session", "list", "--tenant", "{tenant}"),
    ("session", "show", "{session}"),
    ("run", "list", "--tenant", "{tenant}"),
    ("run", "show", "{run}"),
    ("operation", "list", "--tenant", "{tenant}"),
    ("operation", "show", "{cancelled}"),
    ("gate", "list"),
    ("gate", "show", "--adapter", "{run}"),
    ("replica", "list"),
    ("replica", "show", "--base", BASE),
    ("trainer", "list"),
    ("process", "list"),
    ("process", "apis"),
    ("process", "ended"),
    ("price", "list"),
    ("price", "list", "--tenant", "{tenant}"),
    ("audit", "list", "--tenant", "{tenant}", "--action", "tenant_suspend"),
    ("alert", "list"),
    ("alert", "list", "--tenant", "{tenant}"),
    ("queue", "show"),
    ("queue", "placements"),
    ("housekeeping", "status"),
    ("top", "--once"),
    ("audit", "verify"),
    ("usage", "show", "--tenant", "{tenant}", "--since", "2025-12-01", "--by", "project", "--by", "key"),
    ("usage", "verify", "--day", "2025-11-01"),
    ("checkpoint", "list", "--tenant", "{tenant}", "--run", "{run}"),
    ("checkpoint", "show", "tinker://{run}/weights/one"),
    ("base", "list"),
    ("webhook", "list", "--tenant", "{tenant}"),
    ("webhook", "events", "bell", "--tenant", "{tenant}"),
)
EMPTY = {
    ("tenant", "usage"),
    ("price", "list"),
    ("audit", "list"),
    ("gate", "list"),
    ("replica", "list"),
    ("replica", "show"),
    ("base", "list"),
}
"""Reads that find nothing here."""
CHANGES = (
    ("tenant", "create", "new-{tenant}"),
    ("tenant", "set", "{tenant}", "--share", "2", "--limit", "sessions=9"),
    ("tenant", "budget", "{tenant}", "--day", "1000000"),
    ("tenant", "suspend", "{tenant}", "--mode", "read_only", "--reason", "unpaid"),
    ("tenant", "resume", "{tenant}"),
    ("tenant", "delete", "{tenant}", "--grace", "30d", "--mode", "read_only", "--reason", "moved away"),
    ("tenant", "restore", "{tenant}"),
    ("key", "create", "--tenant", "{tenant}", "--note", "ci", "--role", "viewer"),
    ("key", "set", "{key}", "--limit", "train_tokens_per_minute=60"),
    ("key", "rotate", "{key}", "--grace", "0s"),
    ("key", "revoke", "{key}"),
    ("price", "add", "train_tokens", "2", "--base", "{tenant}-base"),
    ("price", "add", "train_tokens", "1.5", "--tenant", "{tenant}"),
    ("tenant", "budget", "{tenant}", "--month", "12.50", "--currency", "USD"),
    ("project", "create", "archive", "--tenant", "{tenant}"),
    ("tenant", "budget", "{tenant}", "--total", "7", "--of-project", "archive"),
    ("project", "set", "archive", "--tenant", "{tenant}", "--limit", "sessions=2"),
    ("operation", "requeue", "{requeued}"),
    ("operation", "cancel", "{cancelled}", "--reason", "wrong data"),
    ("operation", "fail", "{failed}"),
    ("gate", "pause", "--adapter", "{run}", "--reason", "upgrade", "--ttl", "600"),
    ("gate", "resume", "--adapter", "{run}"),
    ("replica", "drain", "{tenant}-0", "--base", BASE),
    ("replica", "sleep", "{tenant}-0", "--base", BASE),
    ("replica", "work", "{tenant}-0", "--base", BASE),
    ("trainer", "drain", "{trainer}", "--reason", "disk"),
    ("trainer", "work", "{trainer}"),
    ("run", "move", "{run}", "--to", "{trainer}"),
    ("run", "weigh", "{run}", "3"),
    ("run", "evict", "{run}"),
    ("session", "end", "{session}", "--reason", "over"),
    ("checkpoint", "delete", "tinker://{run}/weights/one"),
    ("base", "accept", BASE, "--fingerprint", "0" * 64),
    ("webhook", "set", "second", "--url", "https://b.example/", "--tenant", "{tenant}"),
    ("webhook", "set", "second", "--event", "job.finished", "--disabled", "--tenant", "{tenant}"),
    ("webhook", "secret", "second", "--tenant", "{tenant}"),
    ("webhook", "secret", "second", "--rotate", "--tenant", "{tenant}"),
    ("webhook", "test", "second", "--tenant", "{tenant}"),
    ("webhook", "retry", "bell", "{event}", "--tenant", "{tenant}"),
    ("webhook", "delete", "second", "--tenant", "{tenant}"),
)
REPEATLESS = {
    ("price", "add"),
    ("tenant", "create"),
    ("tenant", "restore"),
    ("operation", "cancel"),
    ("operation", "fail"),
    ("operation", "requeue"),
    ("key", "rotate"),
}
"""Commands that a repeat of is refused."""
HTTP_ONLY = (("housekeeping", "run", "expire-links"),)
"""Commands that `weft serve` does itself: it has its files alone, and a command on its database keeps no house."""
HERE_ONLY = (
    ("checkpoint", "merge", "tinker://r/weights/one", "out", "--base", "base"),
    ("checkpoint", "import", "adapter", "--tenant", "cats", "--base-model", "base"),
    ("operator", "create"),
    ("operator", "list"),
    ("operator", "revoke", "tml-0123456789ab"),
    ("ui", "open", "tml-0123456789ab"),
)
"""Commands that need the service's machine."""
NO_COMMAND = {("GET", "/openapi.json")}


@dataclass
class Side:
    """A tenant with all that commands are about, and the names of it by their placeholders."""

    names: dict[str, str]
    told: list[str] = field(default_factory=list)

    def fill(self, arguments: Sequence[str]) -> list[str]:
        return [one.format(**self.names) for one in arguments]

    def plain(self, text: str) -> str:
        """The text with the same words for both sides, and for what is made up or a time."""
        for name, value in sorted(self.names.items(), key=lambda item: -len(item[1])):
            text = text.replace(value, f"<{name}>")
        text = re.sub(r"tml-[0-9a-f]{12}(-[\w-]+)?", "<key>", text)
        text = re.sub(r"\bkey \d+\b", "key 0", text)
        text = re.sub(r"whsec_[\w+/]+=", "<secret>", text)
        text = re.sub(r"\b[0-9a-f]{32}\b", "<id>", text)
        text = re.sub(r"\"(key|key_id|lease_token|generation|others|number|payer)\":\d+", r'"\1":0', text)
        text = re.sub(r"\d{4}-\d\d-\d\d[ T][\d:.]+( UTC|Z)?", "<time>", text)
        return re.sub(r"\"(\w+_seconds)\":[-\d.]+", r'"\1":0', re.sub(r"[-+]?[\d.]+ s\b", "<age>", text))


def process(kind: str, id: str) -> WorkerProcess:
    now = utc_now()
    ends = now + timedelta(days=3650)
    return WorkerProcess(id=id, kind=kind, base_model=BASE, host="here", pid=7, started_at=now, expires_at=ends)


def usage_hour(tenant: Tenant) -> UsageHour:
    sums = dict.fromkeys(("operations", "failed", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens"), 0)
    keys = {"session_id": "gone", "run_id": "", "key_id": 0, "base_model": BASE, "kind": "forward_backward"}
    hour = datetime(2025, 12, 1, 5, tzinfo=UTC)
    return UsageHour(tenant_id=tenant.id, hour=hour, **keys, **sums, train_tokens=7)


async def side(admin: Admin, tenant: Tenant, name: str) -> Side:
    run = await tenant.run()
    await tenant.checkpoint(run, "one")
    requeued, cancelled, failed = [await tenant.operation(run, seq_id) for seq_id in (1, 2, 3)]
    trainer = f"trainer-of-{name}"
    async with admin.service.database.write() as transaction:
        key = await create_key(transaction, tenant=tenant.id, note="of commands", clock=utc_now)
        for one in (process("trainer", trainer), process("pool", f"pool-of-{name}"), process("api", f"api-of-{name}")):
            transaction.add(one)
            await transaction.flush()
        await note_ended(transaction, [f"api-of-{name}"], now=utc_now())
        alert = {"scope": "tenant", "scope_id": "", "period": "day", "period_end": "", "meter": "tokens", "percent": 80}
        transaction.add(BudgetAlert(tenant_id=tenant.id, **alert, amount=10, at=utc_now()))
        placed = await transaction.get(Placement, run)
        assert placed is not None
        spec = WebhookSpec("https://bell.example/", ["job.finished"])
        bell = await set_webhook(
            transaction, tenant.id, "bell", spec, networks=(), defaults=Limits.of(Settings()), now=utc_now()
        )
        event = (await send_test(transaction, bell.webhook, utc_now())).event
    return Side(
        {
            "tenant": name,
            "run": run,
            "session": run.partition(":")[0],
            "requeued": requeued,
            "cancelled": cancelled,
            "failed": failed,
            "key": key.prefix,
            "trainer": trainer,
            "event": event.event_id,
        }
    )


async def weft(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command; return its output."""
    ended = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=dict(environment or {}))
    assert ended.exit_code == 0, (arguments, ended.output, ended.exception)
    return ended.output


def used_routes(admin: Admin) -> set[tuple[str, str]]:
    """Methods and templates of the admin routes that have answered well."""
    found = set()
    for metric in admin.service.services.runtime.telemetry.metrics.registry.collect():
        for sample in metric.samples:
            labels = sample.labels
            if sample.name == "weft_http_requests_total" and labels["status"] < "400" and sample.value:
                found.add((labels["method"], labels["route"].removeprefix("/admin/v1").replace(":path", "")))
    return found


async def test_every_route_has_a_command_that_says_the_same_in_both_ways(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    over_http, on_data = await side(admin, cats, "cats"), await side(admin, dogs, "dogs")
    async with admin.service.database.write() as transaction:
        transaction.add(process("trainer", "trainer-beside"))
        for tenant in (cats, dogs):
            transaction.add(usage_hour(tenant))
    door = ["--url", admin.url, "--key", admin.key.secret]
    data = ["--data", str(admin.data)]
    for arguments in READS:
        for form in ([], ["--json"]):
            told = await weft(*door, *over_http.fill(arguments), *form)
            same = await weft(*over_http.fill(arguments), *form, *data)
            assert over_http.plain(told) == over_http.plain(same), arguments
            if form:
                assert isinstance(json.loads(told), dict)
            else:
                assert told.strip() or arguments[:2] in EMPTY, arguments
    for arguments in CHANGES:
        for form in ([], ["--json"]):
            if form and arguments[:2] in REPEATLESS:
                continue
            told = await weft(*door, *over_http.fill(arguments), *form)
            same = await weft(*on_data.fill(arguments), *form, *data)
            assert over_http.plain(told) == on_data.plain(same), arguments
    export = ("usage", "export", "--tenant", "{tenant}", "--since", "2025-12-01", "--format", "cloudevents")
    told, same = await weft(*door, *over_http.fill(export)), await weft(*on_data.fill(export), *data)
    # The document has one line; beside it, both doors tell of the hours that are left out.
    assert told.count("\n") == same.count("\n") == 2
    told, same = told.replace(cats.id, "<id>"), same.replace(dogs.id, "<id>")
    assert re.sub(r'"id": "\w+"', "", told) == re.sub(r'"id": "\w+"', "", same)
    for arguments in HTTP_ONLY:
        assert "done" in await weft(*door, *arguments)
        refused = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *data])
        assert (refused.exit_code, "--url" in refused.output) == (1, True)
    document: dict[str, Any] = (await admin.http.get("/openapi.json")).json()
    routes = {
        (method.upper(), path.removeprefix("/admin/v1")) for path, one in document["paths"].items() for method in one
    }
    assert routes - used_routes(admin) - NO_COMMAND == set()


@pytest.mark.parametrize(
    ("key", "url", "code", "word"),
    [
        ("tml-0123456789ab-wrong", None, 1, "revoked"),
        ("", None, 1, "WEFT_ADMIN_KEY"),
        (None, "http://127.0.0.1:9", 3, "does not answer"),
    ],
)
async def test_exit_codes_tell_a_refusal_from_a_service_that_does_not_answer(
    admin: Admin, key: str | None, url: str | None, code: int, word: str
) -> None:
    environment = {"WEFT_ADMIN_URL": url or admin.url, "WEFT_ADMIN_KEY": admin.key.secret if key is None else key}
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["tenant", "list"], env=environment)
    assert (ended.exit_code, word in ended.output) == (code, True), ended.output
    usage = await asyncio.to_thread(CliRunner().invoke, app, ["tenant", "show"], env=environment)
    assert usage.exit_code == 2


async def test_a_command_over_http_is_refused_what_is_not_there(admin: Admin, cats: Tenant) -> None:
    environment = {"WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret}
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["tenant", "show", "nobody"], env=environment)
    assert (ended.exit_code, ended.output) == (1, "weft: no tenant is named 'nobody'; `weft tenant list` shows them\n")
    assert json.loads(await weft("tenant", "show", "cats", "--json", environment=environment))["id"] == cats.id


async def test_the_list_of_tenants_tells_who_is_suspended_and_who_is_deleted(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    environment = {"WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret}

    async def states() -> dict[str, str]:
        told = await weft("tenant", "list", environment=environment)
        return {line.split("\t")[0]: line.split("\t")[3] for line in told.splitlines()}

    seen = [await states()]
    for order in (
        ("suspend", "cats", "--mode", "read_only"),
        ("delete", "cats", "--grace", "30d"),
        ("restore", "cats"),
        ("resume", "cats"),
    ):
        await weft("tenant", *order, environment=environment)
        seen.append(await states())
    ends = utc_now() + timedelta(days=30)
    assert seen[2].pop("cats").startswith(f"deleted from {ends:%Y-}")
    assert [one.get("cats") for one in seen] == ["works", "read_only", None, "read_only", "works"]
    assert {one["dogs"] for one in seen} == {"works"}


@pytest.mark.parametrize("arguments", HERE_ONLY, ids=lambda given: " ".join(given[:2]))
def test_a_command_that_needs_the_services_machine_says_so(
    arguments: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, list(arguments), env={"WEFT_ADMIN_URL": "http://127.0.0.1:9"})
    told = f"weft: `weft {' '.join(arguments[:2])}` does not work with --url"
    assert (ended.exit_code, ended.output[: len(told)]) == (1, told)
    assert list(tmp_path.iterdir()) == []


async def test_checkpoints_are_listed_by_their_end_and_deleted_for_one_tenant(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    runs = [await cats.run(), await dogs.run()]
    for tenant, run in zip((cats, dogs), runs, strict=True):
        await tenant.checkpoint(run, "kept")
        # The service's clock stands still; the database's does not.
        alive = utc_now() - admin.service.clock() + timedelta(hours=12)
        await tenant.checkpoint(run, "ends", ttl_seconds=int(alive.total_seconds()))
    found = (await admin.http.get("/checkpoints", params={"expires_within": 86400})).raise_for_status().json()
    assert {one["path"] for one in found["items"]} == {f"tinker://{run}/weights/ends" for run in runs}
    below = f"/checkpoints/{runs[0]}/weights/ends"
    for _ in range(2):
        assert (await admin.http.delete(below)).status_code == 204
    assert (await admin.http.get(below)).status_code == 404
    left = (await admin.http.get("/checkpoints")).raise_for_status().json()["items"]
    assert sorted((one["tenant_id"], one["path"].rpartition("/")[2]) for one in left) == sorted(
        [(cats.id, "kept"), (dogs.id, "ends"), (dogs.id, "kept")]
    )
    assert (await admin.http.delete(f"/checkpoints/{runs[0]}/weights/never")).status_code == 404
    wrong = await admin.http.put(f"/bases/{BASE}", json={"fingerprint": "short"})
    assert (wrong.status_code, "64 digits" in wrong.text) == (400, True)


async def test_operation_kinds_are_the_wires(admin: Admin, cats: Tenant) -> None:
    run = await cats.run()
    await cats.operation(run)
    environment = {"WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret}
    told = await weft("operation", "list", "--kind", OperationKind.OPTIM_STEP, "--json", environment=environment)
    assert [one["lane"] for one in json.loads(told)["items"]] == [run]


async def test_lists_tell_what_goes_by_itself_and_what_fails(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    """A version without a name stays until it is unused; a webhook says why its newest delivery failed."""
    environment = {"WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret}
    for tenant in (cats, dogs):
        run = await tenant.run()
        await tenant.checkpoint(run, "kept")
        await tenant.checkpoint(run, "step", segment=Segment.SAMPLER_WEIGHTS, listed=False)
        async with tenant.service.database.write() as transaction:
            spec = WebhookSpec("https://bell.example/", ["job.finished"])
            await set_webhook(
                transaction, tenant.id, "bell", spec, networks=(), defaults=Limits.of(Settings()), now=utc_now()
            )
    async with cats.service.database.write() as transaction:
        row = await transaction.scalar(select(Webhook).where(Webhook.tenant_id == cats.id))
        assert row is not None
        event = (await send_test(transaction, row, utc_now())).event
        event.attempts, event.due_at, event.last_error = 1, None, "the host answered 500"
    listed = (await weft("checkpoint", "list", environment=environment)).splitlines()
    ends = {(one.split("\t")[0].rpartition("/")[2], one.split("\t")[3]) for one in listed}
    assert ends == {("kept", "no end"), ("step", "until unused")}
    states = [
        (await weft("webhook", "list", "--tenant", name, environment=environment)).split("\t")[1]
        for name in ("cats", "dogs")
    ]
    assert states == ["enabled, last delivery failed: the host answered 500", "enabled"]
