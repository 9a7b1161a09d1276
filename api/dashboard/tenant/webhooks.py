"""Webhooks of a tenant: list, make, change, test and delete them, with the log of their deliveries, as the API does."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from api.dashboard.form_values import body_of, text
from api.dashboard.forms import Form, see
from api.dashboard.rendering import page
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import PageWebhookAdmin
from api.route_bounds import bounded
from api.services import ApiServices, Services
from api.webhook_records import WebhookBody, WebhookSecretBody, WebhookState
from api.weft import webhooks
from api.weft.webhooks import Before, EventId, Name
from contracts.errors import NotFound, WeftError
from contracts.webhooks import EVERY, MEANINGS, EventKind
from tenants.rights import Principal

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

_TICK = "event:"
_CHOICES = {kind.value: meaning for kind, meaning in MEANINGS.items() if kind is not EventKind.WEBHOOK_TEST}
"""Events that a webhook may want. A test comes to each that is asked for one."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Outcome of a form: the secret that is shown once, or the refusal."""

    secret: WebhookSecretBody | None = None
    refusal: WeftError | None = None

    @property
    def status(self) -> int:
        return 200 if self.refusal is None else self.refusal.status

    @property
    def problem(self) -> str:
        return "" if self.refusal is None else self.refusal.message


@router.get("")
async def webhooks_page(caller: PageWebhookAdmin, services: Services, request: Request) -> Response:
    """List the tenant's webhooks."""
    return await _list(request, services, caller, {}, _Told())


@router.post("")
async def make(caller: PageWebhookAdmin, services: Services, request: Request, form: Form) -> Response:
    """Make a webhook and show its secret once."""
    name = form.get("name", "").strip()
    try:
        await webhooks.change_webhook(caller, services, name, _state(form), is_new=True)
    except WeftError as refusal:
        return await _list(request, services, caller, form, _Told(refusal=refusal))
    secret = await webhooks.read_webhook_secret(caller, services, name)
    return await _one(request, services, caller, name, _Told(secret=secret))


@router.get("/{name}")
async def webhook_page(
    caller: PageWebhookAdmin, services: Services, request: Request, name: Name, before: Before = None
) -> Response:
    """Show one webhook with the log of its deliveries. Raises ``NotFound``."""
    return await _one(request, services, caller, name, _Told(), before)


@router.get("/{name}/deliveries", dependencies=[UNATTENDED])
async def deliveries(
    caller: PageWebhookAdmin, services: Services, request: Request, name: Name, before: Before = None
) -> Response:
    """Show the log alone, as it is now. Raises ``NotFound``."""
    log = await webhooks.list_webhook_events(caller, services, name, before)
    return page(request, "tenant/webhook_deliveries.html", name=name, log=log, before=before)


@router.post("/{name}")
async def change(caller: PageWebhookAdmin, services: Services, request: Request, name: Name, form: Form) -> Response:
    """Give the webhook another address, other events or another note. Raises ``NotFound``."""
    await _found(caller, services, name)
    try:
        await webhooks.change_webhook(caller, services, name, _state(form))
    except WeftError as refusal:
        return await _one(request, services, caller, name, _Told(refusal=refusal))
    return _see(name)


@router.post("/{name}/enable")
async def enable(caller: PageWebhookAdmin, services: Services, name: Name) -> Response:
    """Have events sent again. Raises ``NotFound``."""
    return await _switched(caller, services, name, is_enabled=True)


@router.post("/{name}/disable")
async def disable(caller: PageWebhookAdmin, services: Services, name: Name) -> Response:
    """Have nothing sent; what waits stays. Raises ``NotFound``."""
    return await _switched(caller, services, name, is_enabled=False)


@router.post("/{name}/secret")
async def rotate_secret(caller: PageWebhookAdmin, services: Services, request: Request, name: Name) -> Response:
    """Make another secret and show it once. Raises ``NotFound``."""
    await _found(caller, services, name)
    try:
        secret = await webhooks.rotate_webhook_secret(caller, services, name)
    except WeftError as refusal:
        return await _one(request, services, caller, name, _Told(refusal=refusal))
    return await _one(request, services, caller, name, _Told(secret=secret))


@router.post("/{name}/test")
async def send_test(caller: PageWebhookAdmin, services: Services, name: Name) -> Response:
    """Send a test event. Raises ``NotFound``."""
    await webhooks.send_test_event(caller, services, name)
    return _see(name)


@router.post("/{name}/events/{event_id}/retry")
async def retry(caller: PageWebhookAdmin, services: Services, name: Name, event_id: EventId) -> Response:
    """Send an event once more. Raises ``NotFound``."""
    await webhooks.retry_webhook_event(caller, services, name, event_id)
    return _see(name)


@router.post("/{name}/delete")
@bounded(goes_on=True)
async def delete(caller: PageWebhookAdmin, services: Services, name: Name) -> Response:
    """Delete the webhook, with the events that wait for it. Raises ``NotFound``."""
    await _found(caller, services, name)
    await webhooks.delete_own_webhook(caller, services, name)
    return see("/ui/webhooks")


def _state(form: Mapping[str, str]) -> WebhookState:
    """Return the state that the form gives; without a tick it wants every event. Raises ``InvalidRequest``."""
    ticked = [name.removeprefix(_TICK) for name in form if name.startswith(_TICK)]
    return body_of(
        WebhookState, url=form.get("url", "").strip(), events=ticked or [EVERY], note=text(form, "note") or ""
    )


async def _switched(caller: Principal, services: ApiServices, name: str, *, is_enabled: bool) -> Response:
    await _found(caller, services, name)
    await webhooks.change_webhook(caller, services, name, WebhookState(is_enabled=is_enabled))
    return _see(name)


async def _found(caller: Principal, services: ApiServices, name: str) -> WebhookBody:
    """Return the tenant's webhook of that name. Raises ``NotFound``."""
    for one in (await webhooks.list_own_webhooks(caller, services)).webhooks:
        if one.name == name:
            return one
    raise NotFound(f"no webhook is named {name[:100]!r}")


async def _list(
    request: Request, services: ApiServices, caller: Principal, given: Mapping[str, str], told: _Told
) -> Response:
    """Return the list. ``given`` are the fields of a form that was refused, which is shown again as it was filled in."""
    found = await webhooks.list_own_webhooks(caller, services)
    return page(
        request,
        "tenant/webhooks.html",
        status=told.status,
        webhooks=found.webhooks,
        given=given,
        choices=_CHOICES,
        problem=told.problem,
    )


async def _one(
    request: Request, services: ApiServices, caller: Principal, name: str, told: _Told, before: int | None = None
) -> Response:
    webhook = await _found(caller, services, name)
    log = await webhooks.list_webhook_events(caller, services, name, before)
    return page(
        request,
        "tenant/webhook.html",
        status=told.status,
        webhook=webhook,
        name=name,
        log=log,
        before=before,
        choices=_CHOICES,
        secret=told.secret,
        problem=told.problem,
    )


def _see(name: str) -> Response:
    return see(f"/ui/webhooks/{name}")
