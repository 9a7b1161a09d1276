"""``weft webhook``: sets, lists, tests and deletes tenants' webhooks, and shows how their deliveries went."""

from typing import Annotated

import typer

from api.webhook_records import WebhookBody, WebhookEventBody, WebhookSecretBody, WebhookState
from cli.admin_client import AdminClient, segment
from cli.admin_command import Done, Shown, admin_command
from cli.tenants import path_of
from contracts.webhooks import EventKind

app = typer.Typer()

TenantOption = Annotated[str, typer.Option(help="Name of the tenant.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the webhook.")]


@admin_command(app, "set")
def set_webhook(
    admin: AdminClient,
    name: NameArgument,
    url: Annotated[str | None, typer.Option(help="Address to send to; needed for a new webhook.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(help=f"Event to send, of {', '.join(EventKind)}; repeatable. Default for a new one: all."),
    ] = None,
    note: Annotated[str | None, typer.Option(help="Purpose of the webhook.")] = None,
    enabled: Annotated[
        bool | None, typer.Option("--enabled/--disabled", help="Whether anything is sent. What waits stays.")
    ] = None,
    tenant: TenantOption = "default",
) -> Shown:
    """Make a webhook, or change what is given of it, and print its state. `weft webhook secret` prints its secret."""
    state = WebhookState(url=url, events=event, note=note, is_enabled=enabled)
    made = admin.send("PUT", _path(admin, tenant, name), WebhookBody, state)
    return Shown(made, [_line(made)])


@admin_command(app, "list")
def list_all(admin: AdminClient, tenant: TenantOption = "default") -> Shown:
    """List a tenant's webhooks: name, state, address, events, last delivery, events that were missed."""
    found = admin.page(_path(admin, tenant), WebhookBody)
    return Shown(found, [_line(one) for one in found.items])


@admin_command(app, "delete")
def delete(admin: AdminClient, name: NameArgument, tenant: TenantOption = "default") -> Shown:
    """Delete a webhook, with the events that wait for it; one that is gone stays so."""
    admin.delete(_path(admin, tenant, name))
    return Shown(Done(done=name), [f"{name} is deleted"])


@admin_command(app, "secret")
def secret(
    admin: AdminClient,
    name: NameArgument,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make another secret; the one before signs beside it for a day.")
    ] = False,
    tenant: TenantOption = "default",
) -> Shown:
    """Print the secret with which the receiver checks signatures."""
    path = _path(admin, tenant, name, "secret")
    found = admin.send("POST", path, WebhookSecretBody) if rotate else admin.get(path, WebhookSecretBody)
    return Shown(found, [found.secret])


@admin_command(app, "test")
def send_test(admin: AdminClient, name: NameArgument, tenant: TenantOption = "default") -> Shown:
    """Send a test event to a webhook and print its id."""
    sent = admin.send("POST", _path(admin, tenant, name, "test"), WebhookEventBody)
    return Shown(sent, [sent.id])


@admin_command(app, "events")
def events(admin: AdminClient, name: NameArgument, tenant: TenantOption = "default") -> Shown:
    """List the newest events of a webhook: id, type, time, attempts, and how the last one went."""
    found = admin.page(_path(admin, tenant, name, "events"), WebhookEventBody)
    return Shown(found, [_event_line(one) for one in found.items])


@admin_command(app, "retry")
def retry(
    admin: AdminClient,
    name: NameArgument,
    event: Annotated[str, typer.Argument(help="Id of the event.")],
    tenant: TenantOption = "default",
) -> Shown:
    """Send an event once more, under the same id."""
    sent = admin.send("POST", _path(admin, tenant, name, f"events/{segment(event)}/retry"), WebhookEventBody)
    return Shown(sent, [_event_line(sent)])


def _path(admin: AdminClient, tenant: str, name: str | None = None, below: str | None = None) -> str:
    parts = ["webhooks", *([] if name is None else [segment(name)]), *([] if below is None else [below])]
    return path_of(admin, tenant, "/".join(parts))


def _line(one: WebhookBody) -> str:
    last = "never" if one.succeeded_at is None else f"{one.succeeded_at:%Y-%m-%dT%H:%M:%SZ}"
    return f"{one.name}\t{_state(one)}\t{one.url}\t{','.join(one.events)}\t{last}\t{one.missed}"


def _state(one: WebhookBody) -> str:
    if not one.is_enabled:
        return f"disabled ({one.disabled_reason or 'by hand'})"
    return "enabled" if one.last_error is None else f"enabled, last delivery failed: {one.last_error}"


def _event_line(one: WebhookEventBody) -> str:
    if one.delivered_at is not None and one.due_at is None:
        state = f"taken {one.delivered_at:%Y-%m-%dT%H:%M:%SZ}"
    elif one.due_at is None:
        state = f"given up: {one.last_error}"
    else:
        state = "waits" if one.last_error is None else f"waits: {one.last_error}"
    return f"{one.id}\t{one.type}\t{one.created_at:%Y-%m-%dT%H:%M:%SZ}\t{one.attempts}\t{state}"
