"""``weft tenant``: makes, lists and shows tenants, sets their shares and limits, suspends and resumes them, tells usage."""

from collections.abc import Mapping
from typing import Annotated

import typer

from api.admin.bodies import Listed
from api.admin.budgets import NewBudget
from api.admin.deletions import DeletionRequest, MarkedTenant
from api.admin.keys import OperatorsKeyBody
from api.admin.shares import TenantShares
from api.admin.tenants import (
    MadeTenant,
    NewSuspension,
    NewTenant,
    TenantBody,
    TenantChange,
)
from api.admin.usage import UsageDayBody
from api.budget_reports import BudgetReport, MoneyBudgetReport
from api.standing_records import LimitReport, RateReport, RequestRateReport, StandingReport
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.tables import Table
from cli.times import span
from contracts.errors import InvalidRequest, NotFound
from contracts.plurals import counted
from contracts.service_class import ServiceClass
from tenants.budget_settings import MOST
from tenants.budgets import Period
from tenants.key_text import shown_prefix
from tenants.rights import SuspendMode

app = typer.Typer()

_DEFAULT = "default"
_NONE = "none"

BudgetOption = Annotated[
    str | None, typer.Option(metavar="AMOUNT", help="Tokens, an amount of `--currency`, or `none` for no budget.")
]
NameArgument = Annotated[str, typer.Argument(help="Name of the tenant.")]


def find_tenant(admin: AdminClient, name: str) -> TenantBody:
    """Return the tenant of that name. Raises ``NotFound``."""
    found = admin.page("/tenants", TenantBody, name=name).items
    if not found:
        raise NotFound(f"no tenant is named {name[:100]!r}; `weft tenant list` shows them")
    return found[0]


@admin_command(app, "create", may_begin=True)
def create(admin: AdminClient, name: NameArgument) -> Shown:
    """Make a tenant and its first key. The key is shown only once.

    A data folder that is named and has no database gets one, for a tenant that is made before the service's first start.
    """
    made = admin.send("POST", "/tenants", MadeTenant, NewTenant(name=name))
    return Shown(made, [made.key.secret])


@admin_command(app, "list")
def list_all(admin: AdminClient) -> Shown:
    """List all tenants, oldest first: name, id, time of creation, state."""
    found = sorted(admin.every("/tenants", TenantBody), key=lambda one: (one.created_at, one.id))
    return Shown.of(Listed(items=found), Table(("name", "id", "made", "state"), [_listed(one) for one in found]))


def _listed(one: TenantBody) -> tuple[str, ...]:
    state = "works" if one.suspension is None else one.suspension.mode
    if one.delete_at is not None:
        state = f"deleted from {one.delete_at:%Y-%m-%d %H:%M} UTC on" if one.deleted_at is None else "deleted"
    return one.name, one.id, f"{one.created_at:%Y-%m-%d %H:%M}", state


@admin_command(app, "show")
def show(admin: AdminClient, name: NameArgument) -> Shown:
    """Show a tenant: its share, the limits of its own, and whether it is suspended."""
    found = admin.get(f"/tenants/{find_tenant(admin, name).id}", TenantBody)
    return Shown(found, _lines(found))


@admin_command(app, "set")
def set_values(
    admin: AdminClient,
    name: NameArgument,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A limit, as `weft tenant limits` names it; VALUE may be `default`."),
    ] = None,
    share: Annotated[float | None, typer.Option(help="Weight against other tenants where work is shared out.")] = None,
    service_class: Annotated[
        ServiceClass | None, typer.Option("--class", help="Class, whose factor is on the share: 4, 1 or a quarter.")
    ] = None,
) -> Shown:
    """Give a tenant limits, a share or a class. Limits hold from its next request on, the others from the next pass on."""
    limits = dict(parsed_limit(one) for one in limit or []) or None
    change = TenantChange(share=share, service_class=service_class, limits=limits)
    if limits is None and share is None and service_class is None:
        raise InvalidRequest("nothing to set; give --limit NAME=VALUE, --share or --class")
    path = f"/tenants/{find_tenant(admin, name).id}"
    _, version = admin.get_versioned(path, TenantBody)
    return Shown(admin.send("PATCH", path, TenantBody, change, if_match=version), ["set"])


@admin_command(app, "limits")
def show_limits(admin: AdminClient, name: NameArgument) -> Shown:
    """List a tenant's limits: name, value, whether it is the tenant's own, use, what happens there; then rates and budgets."""
    found = admin.get(f"/tenants/{find_tenant(admin, name).id}/standing", StandingReport)
    names = {project.id: project.name for project in found.projects}
    rates = [_rate_row(rate, names) for rate in found.rates]
    rates += [_request_row(rate, names) for rate in found.request_rates]
    return Shown.of(
        found,
        Table(("", "value"), [("share", f"{found.share:g}"), ("class", found.service_class)]),
        Table(("limit", "value", "whose", "used", "beyond it"), [_limit_row(one) for one in found.limits]),
        Table(("", "name", "limit", "value", "used"), _project_rows(found)),
        Table(("", "whose", "of", "bound", "now", "before"), rates),
        Table(("", "whose", "period", "amount", "spent", ""), _budget_rows(found)),
    )


def _limit_row(one: LimitReport) -> tuple[str, ...]:
    return one.name, str(one.value), "own" if one.is_own else _DEFAULT, _used(one.used), one.reason


def _used(number: int | None) -> str:
    return "-" if number is None else str(number)


def _project_rows(found: StandingReport) -> list[tuple[str, ...]]:
    return [
        ("project", project.name, own.name, str(own.value), _used(own.used))
        for project in found.projects
        for own in project.limits
    ]


def _budget_rows(found: StandingReport) -> list[tuple[str, ...]]:
    rows = [_budget_row(budget, f"{budget.amount}", f"{budget.spent}") for budget in found.budgets]
    for money in found.money_budgets:
        unpriced = f"; {money.unpriced_tokens} tokens without a price" if money.unpriced_tokens else ""
        amount, spent = f"{money.amount} {money.currency}", f"{money.spent} {money.currency}{unpriced}"
        rows.append(_budget_row(money, amount, spent))
    return rows


def _request_row(rate: RequestRateReport, projects: Mapping[str, str]) -> tuple[str, ...]:
    bound = f"{rate.per_minute} a minute"
    return "rate", _whose(rate, projects), "requests", bound, f"{rate.remaining} may come now", f"{rate.used} came"


def _whose(rate: RateReport | RequestRateReport, projects: Mapping[str, str]) -> str:
    whose = "tenant" if rate.key is None else f"key {rate.key}"
    return whose if rate.project is None else f"project {projects.get(rate.project, rate.project)}"


def _rate_row(rate: RateReport, projects: Mapping[str, str]) -> tuple[str, ...]:
    bound = f"{rate.per_minute} tokens a minute, {rate.burst} at once"
    now, before = f"{rate.remaining} may run now", f"{rate.waiting} wait"
    return "rate", _whose(rate, projects), rate.meter, bound, now, before


def _budget_row(budget: BudgetReport | MoneyBudgetReport, amount: str, spent: str) -> tuple[str, ...]:
    whose = "tenant" if budget.key is None else f"key {budget.key}"
    whose = whose if budget.project is None else f"project {budget.project_name or budget.project}"
    until = "never" if budget.resets_at is None else f"{budget.resets_at:%Y-%m-%d %H:%M}"
    return "budget", whose, budget.period, amount, spent, f"begins anew: {until}"


@admin_command(app, "shares")
def show_shares(admin: AdminClient) -> Shown:
    """List what each tenant was served against what it was entitled to, in the last 5 minutes and the last hour."""
    found = sorted(admin.every("/shares", TenantShares), key=lambda one: one.name)
    columns = ("name", "state", "5 minutes", "an hour", "pending", "stored", "tokens")
    rows = [_served(one) for one in found]
    return Shown.of(Listed(items=found), Table(columns, rows))


def _served(one: TenantShares) -> list[str]:
    told = [
        f"{window.served_share:.0%} of {window.entitled_share:.0%} in {window.seconds // 60} min"
        for window in one.served
    ]
    state = "works" if one.suspension is None else str(one.suspension.mode)
    return [one.name, state, *told, f"{one.pending} pending", f"{one.stored_bytes} bytes", f"{one.tokens_today} today"]


@admin_command(app, "budget")
def set_budgets(
    admin: AdminClient,
    name: NameArgument,
    day: BudgetOption = None,
    month: BudgetOption = None,
    total: BudgetOption = None,
    of_key: Annotated[str | None, typer.Option(help="Bound one key only: the beginning of the key, tml-….")] = None,
    of_project: Annotated[str | None, typer.Option(help="Bound one project only: its name or id.")] = None,
    currency: Annotated[
        str | None, typer.Option(help="Currency of the prices, such as USD, of budgets in money; without it: tokens.")
    ] = None,
) -> Shown:
    """Give a tenant, or one of its keys or projects, budgets. What was used in the period before counts."""
    given = ((Period.DAY, day), (Period.MONTH, month), (Period.TOTAL, total))
    amounts = [(period, _amount(text, currency)) for period, text in given if text is not None]
    if not amounts:
        raise InvalidRequest("nothing to set; give --day, --month or --total")
    for period, amount in amounts:
        change = NewBudget(amount=amount, key=of_key, project=of_project, currency=currency)
        found = admin.send("PUT", path_of(admin, name, f"budgets/{period}"), StandingReport, change)
    key = None if of_key is None else admin.page("/keys", OperatorsKeyBody, prefix=shown_prefix(of_key)).items[0]
    of = None if key is None else key.payer or key.key_id
    shared = [f"of key {of}, whose budgets key {key.key_id} shares"] if key is not None and of != key.key_id else []
    periods = {period for period, _ in amounts}
    every: list[BudgetReport | MoneyBudgetReport] = [*found.budgets, *found.money_budgets]
    spent = [
        "\t".join(row)
        for one, row in zip(every, _budget_rows(found), strict=True)
        if one.period in periods and one.key == of and of_project in _names_of(one) and currency == _currency(one)
    ]
    return Shown(found, ["set", *shared, *spent])


def _names_of(one: BudgetReport | MoneyBudgetReport) -> tuple[str | None, ...]:
    return one.project, one.project_name


def _currency(one: BudgetReport | MoneyBudgetReport) -> str | None:
    return one.currency if isinstance(one, MoneyBudgetReport) else None


def _amount(text: str, currency: str | None) -> int | str | None:
    if text == _NONE:
        return None
    if currency is not None:
        return text
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise InvalidRequest(f"a budget is 1 to {MOST} tokens, or `none`; got {text[:100]!r}")
    return int(text)


@admin_command(app, "suspend")
def suspend(
    admin: AdminClient,
    name: NameArgument,
    reason: Annotated[str, typer.Option(help="Reason that the tenant's clients read.")] = "",
    mode: Annotated[
        SuspendMode,
        typer.Option(help="hold: new work waits too. read_only: new work is refused. blocked: every request is."),
    ] = SuspendMode.HOLD,
) -> Shown:
    """Have a tenant's accepted work wait: nothing of it is lost. What is computed now ends."""
    path = f"/tenants/{find_tenant(admin, name).id}/suspension"
    found = admin.send("PUT", path, TenantBody, NewSuspension(mode=mode, reason=reason))
    return Shown(found, [f"{name}\tsuspended\t{mode}"])


@admin_command(app, "resume")
def resume(admin: AdminClient, name: NameArgument) -> Shown:
    """Have a suspended tenant's work go on from where it is."""
    found = admin.send("DELETE", f"/tenants/{find_tenant(admin, name).id}/suspension", TenantBody)
    return Shown(found, [f"{name}\tresumed"])


@admin_command(app, "delete")
def delete(
    admin: AdminClient,
    name: NameArgument,
    grace: Annotated[str, typer.Option(help="Time until the removal: 0s, 12h, 7d (WEFT_DELETION_GRACE).")] = "",
    mode: Annotated[
        SuspendMode, typer.Option(help="Until then: read_only lets the tenant export, blocked refuses it everything.")
    ] = SuspendMode.BLOCKED,
    reason: Annotated[str, typer.Option(help="Reason that the tenant's clients read.")] = "",
) -> Shown:
    """Suspend a tenant, and have all it has removed once the grace time is over. Usage and audit stay.

    Until then `weft tenant restore` takes it back.
    """
    seconds = int(span(grace, "--grace").total_seconds()) if grace else None
    asked = DeletionRequest(grace_seconds=seconds, mode=mode, reason=reason)
    found = admin.send("PUT", path_of(admin, name, "deletion"), MarkedTenant, asked)
    begin = "" if found.delete_at is None else f" from {found.delete_at:%Y-%m-%d %H:%M} UTC on"
    lines = [f"{name}\tis deleted{begin}"]
    if found.checkpoints:
        lost = counted(found.checkpoints, "checkpoint")
        lines.append(f"with it: {lost} of {counted(found.stored_bytes, 'byte')}; export what is to stay")
    return Shown(found, lines)


@admin_command(app, "restore")
def restore(admin: AdminClient, name: NameArgument) -> Shown:
    """Take back a tenant's deletion before its grace time is over; its work goes on, unless it was suspended before."""
    found = admin.send("DELETE", path_of(admin, name, "deletion"), TenantBody)
    return Shown(found, [f"{name}\trestored"])


@admin_command(app, "usage")
def show_usage(
    admin: AdminClient,
    days: Annotated[int, typer.Option(min=1, help="Number of days up to today.")] = 30,
    tenant: Annotated[str | None, typer.Option(help="Name of the tenant; default: all.")] = None,
) -> Shown:
    """List usage: tenant, day, base model, kind of operation, operations and tokens."""
    found = admin.every("/usage", UsageDayBody, days=days, tenant=tenant)
    found.sort(key=lambda one: (one.tenant, one.day, one.base_model, one.kind))
    rows = [(one.tenant, f"{one.day}", one.base_model, one.kind, f"{one.operations}", f"{one.tokens}") for one in found]
    return Shown.of(Listed(items=found), Table(("tenant", "day", "base model", "kind", "operations", "tokens"), rows))


def _lines(one: TenantBody) -> list[str]:
    lines = [
        f"id\t{one.id}",
        f"name\t{one.name}",
        f"made\t{one.created_at:%Y-%m-%d %H:%M}",
        f"share\t{one.share:g}",
        f"class\t{one.service_class}",
    ]
    lines += [f"limit {name}\t{value}" for name, value in one.limits.items()]
    held = one.suspension
    if held is not None:
        lines.append(f"suspended\t{held.mode} since {held.since:%Y-%m-%d %H:%M:%S}: {held.reason or 'no reason given'}")
    if one.delete_at is not None:
        lines.append(f"deleted\tfrom {one.delete_at:%Y-%m-%d %H:%M} UTC on")
    return lines


def parsed_limit(text: str) -> tuple[str, int | None]:
    """Return the name and value of ``NAME=VALUE``; None for the default. Raises ``InvalidRequest``."""
    name, _, value = text.partition("=")
    if value == _DEFAULT:
        return name, None
    try:
        return name, int(value)
    except ValueError:
        raise InvalidRequest(f"--limit takes NAME=VALUE with a whole number or `default`; got {text[:100]!r}") from None


def path_of(admin: AdminClient, name: str, below: str) -> str:
    """Return the path of what is below a tenant of that name. Raises ``NotFound``."""
    return f"/tenants/{segment(find_tenant(admin, name).id)}/{below}"
