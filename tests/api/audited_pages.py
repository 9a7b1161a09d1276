"""Forms of pages that change something, each with its entries in the audit log, or with the reason for which it has none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from sqlalchemy import select, text

from store.tables import AuditEntry, Base
from tenants.audit_actions import Action

_REFUSE = "CREATE TRIGGER refuse BEFORE INSERT ON audit_entries BEGIN SELECT RAISE(ABORT, 'no room'); END"


@dataclass(frozen=True)
class Change:
    """One form. ``{run}`` and the like in its path and fields stand for ids.

    - ``actions``: entries that it makes.
    - ``keeps_code``: False for a form that uses up a one-time code before anything else.
    """

    path: str
    actions: tuple[Action, ...]
    form: Mapping[str, str] = field(default_factory=dict)
    keeps_code: bool = True


_CHECKPOINT = "/ui/checkpoints/{run_id}/{segment}/{name}"
_HOOK = {"url": "https://bell.example/"}

TENANTS = (
    Change("/ui/adapters/{run_id}/pause", (Action.GATE_PAUSE,), {"mode": "keep", "ttl_minutes": "5"}),
    Change("/ui/adapters/{run_id}/resume", (Action.GATE_RESUME,)),
    Change("/ui/adapters/{run_id}/reload", (Action.RUN_RELOAD,)),
    Change(_CHECKPOINT + "/ttl", (Action.CHECKPOINT_SET,), {"hours": "5"}),
    Change(_CHECKPOINT + "/publish", (Action.CHECKPOINT_PUBLISH,)),
    Change(_CHECKPOINT + "/unpublish", (Action.CHECKPOINT_UNPUBLISH,)),
    Change(_CHECKPOINT + "/download", (Action.CHECKPOINT_READ,)),
    Change(_CHECKPOINT + "/delete", (Action.CHECKPOINT_DELETE,), {"name": "one"}),
    Change(
        "/ui/checkpoints/delete",
        (Action.CHECKPOINT_DELETE,),
        {"tick:tinker://{run_id}/sampler_weights/two": "on", "confirmed": "1"},
    ),
    Change("/ui/keys", (Action.KEY_CREATE,), {"note": "made"}),
    Change("/ui/keys/{number}/rotate", (Action.KEY_ROTATE,)),
    Change("/ui/keys/{number}/revoke", (Action.KEY_REVOKE,)),
    Change("/ui/projects", (Action.PROJECT_CREATE,), {"name": "third"}),
    # A new webhook's secret is shown, which is a read of it.
    Change("/ui/webhooks", (Action.WEBHOOK_SET, Action.WEBHOOK_READ), {"name": "bell", **_HOOK}),
    Change("/ui/webhooks/{name}", (Action.WEBHOOK_SET,), {**_HOOK, "note": "ours"}),
    Change("/ui/webhooks/{name}/disable", (Action.WEBHOOK_SET,)),
    Change("/ui/webhooks/{name}/enable", (Action.WEBHOOK_SET,)),
    Change("/ui/webhooks/{name}/secret", (Action.WEBHOOK_ROTATE,)),
    Change("/ui/webhooks/{name}/test", (Action.WEBHOOK_TEST,)),
    Change("/ui/webhooks/{name}/events/{event_id}/retry", (Action.WEBHOOK_RETRY,)),
    Change("/ui/webhooks/{name}/delete", (Action.WEBHOOK_DELETE,)),
    Change("/ui/sessions/{number}/end", (Action.LOGIN_END,)),
    Change("/ui/sessions/others/end", (Action.LOGIN_END,)),
    # A browser that logs in anew loses the session that it had.
    Change("/ui/login", (Action.LOGIN_END, Action.LOGIN_BEGIN), {"key": "{key}"}),
    Change("/ui/login/code", (Action.LOGIN_END, Action.LOGIN_BEGIN), {"code": "{code}"}, keeps_code=False),
    Change("/ui/logout", (Action.LOGIN_END,)),
)
"""Forms of a tenant's pages, in an order in which each can be sent."""

_SAMPLE = "a sample: the ledger's row tells it"
_REPORT = "a browser's report of what the pages' policy has kept from it: the security log tells it"
TENANTS_UNAUDITED: Mapping[str, str] = {
    "/ui/playground": _SAMPLE,
    "/ui/playground/stream": _SAMPLE,
    "/ui/samples/{request_id}/stop": _SAMPLE,
    "/ui/policy-reports": _REPORT,
}

_TENANT = "/ops/tenants/{tenant_id}"
_ANY = {"version": "*"}

OPERATORS = (
    Change(f"{_TENANT}/settings", (Action.TENANT_SET,), {**_ANY, "share": "2"}),
    Change(f"{_TENANT}/budget", (Action.TENANT_BUDGET,), {**_ANY, "period": "day", "amount": "1000"}),
    Change(f"{_TENANT}/suspend", (Action.TENANT_SUSPEND,), {**_ANY, "mode": "hold", "reason": "unpaid"}),
    Change(f"{_TENANT}/resume", (Action.TENANT_RESUME,), _ANY),
    Change(f"{_TENANT}/look", (Action.TENANT_LOOK,), {"reason": "ticket 7"}),
    Change("/ops/runs/{run_id}/move", (Action.RUN_MOVE,), {"to": "trainer-2", "reason": "room"}),
    Change("/ops/runs/{run_id}/evict", (Action.RUN_EVICT,), {"reason": "room"}),
    Change("/ops/sessions/{session_id}/end", (Action.SESSION_END,), {"reason": "stuck"}),
    Change("/ops/processes/{trainer_id}/drain", (Action.TRAINER_DRAIN,), {"reason": "new driver"}),
    Change("/ops/processes/{trainer_id}/work", (Action.TRAINER_WORK,)),
    Change(
        "/ops/replicas/directive",
        (Action.REPLICA_DIRECT,),
        {"replica": "vllm-0", "base_model": "test/tiny", "directive": "drain", "reason": "new driver"},
    ),
    Change("/ops/browsers/{number}/end", (Action.LOGIN_END,)),
    Change("/ops/login", (Action.LOGIN_END, Action.LOGIN_BEGIN), {"key": "{key}"}),
    Change("/ops/login/code", (Action.LOGIN_END, Action.LOGIN_BEGIN), {"code": "{code}"}, keeps_code=False),
    Change("/ops/logout", (Action.LOGIN_END,)),
)
"""Forms of operators' pages, in an order in which each can be sent."""

OPERATORS_UNAUDITED: Mapping[str, str] = {
    "/ops/housekeeping/run": "it does what housekeeping does anyway",
    "/ops/policy-reports": _REPORT,
}


async def entries(service: Any) -> list[AuditEntry]:
    """Return every entry, the oldest first."""
    async with service.database.read() as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


async def send_both_ways(
    service: Any, http: httpx.AsyncClient, change: Change, ids: Mapping[str, str]
) -> list[AuditEntry]:
    """Send the form while no entry can be written, when it must change nothing, and again; return the entries it then makes."""
    path = _filled(change.path, ids)
    # A form without any field has no kind of content.
    form = {"sent": "1", **{_filled(name, ids): _filled(value, ids) for name, value in change.form.items()}}
    if change.keeps_code:
        await _execute(service, _REFUSE)
        before = await _rows(service)
        refused = await http.post(path, data=form)
        assert refused.status_code >= 500, (change.path, refused.status_code, refused.text)
        assert await _rows(service) == before, change.path
        await _execute(service, "DROP TRIGGER refuse")
    known = len(await entries(service))
    answer = await http.post(path, data=form)
    assert answer.status_code in (200, 303), (change.path, answer.text)
    if "set-cookie" in answer.headers:
        http.headers["cookie"] = answer.headers["set-cookie"].partition(";")[0]
    return (await entries(service))[known:]


async def _execute(service: Any, statement: str) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(text(statement))


async def _rows(service: Any) -> dict[str, list[str]]:
    """Return every row of every table."""
    async with service.database.read() as session:
        return {
            table.name: sorted(map(str, await session.execute(table.select()))) for table in Base.metadata.sorted_tables
        }


def _filled(template: str, ids: Mapping[str, str]) -> str:
    for name, id in ids.items():
        template = template.replace(f"{{{name}}}", id)
    return template
