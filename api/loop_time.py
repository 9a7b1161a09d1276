"""Parts of the event loop's time, so that one sender's many requests wait for each other and not others for them.

A sender is a tenant, once its key or its web session is known, or else an address. The time of each sender's requests is
measured, step by step. A sender that has had more than its part begins its next request, or sends its next piece of an
answer, when the debt is paid off by the time that passes. Nothing that has begun is stopped: ``api.admission`` bounds how
much each tenant may hold.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic, process_time

from starlette.datastructures import Headers
from starlette.types import Scope

from api.connection_holder import network_of
from api.presented_key import presented_key
from api.presented_session import COOKIES, presented_session
from contracts.errors import TooManyRequests
from contracts.ids import TenantId

BURST_SECONDS = 0.05
"""Time in which a sender may use its part at once, before its requests wait."""
START_SECONDS = 0.001
"""Time charged at a request's beginning for what its own steps do not show: its parsing, and reads made with others'."""
MEMORY_SECONDS = 1.0
"""Time constant of the rates of use: what a sender used before fades by a factor of e in it."""
STRANGERS_PART = 0.2
"""Most of the time for all addresses without a known key or session together."""
_LEAST_PART = 0.1
"""Part that a tenant has however many others there are."""
_RESERVE = 2.0
"""Room that a sender leaves to the others, as a multiple of their use of late."""
_IN_USE = 0.01
"""Least part of the time that makes a sender one of those who share it."""
_MOST_SECRETS = 10_000
_FORGOTTEN = 0.001
"""Part of the time below which a sender without requests is forgotten."""
_LOOK_SECONDS = 0.02
_LEAST_WAIT_SECONDS = 0.001
_LONGEST_RETRY_SECONDS = 60
_HEALTH = "/healthz"


@dataclass(slots=True)
class _Rate:
    """Seconds used a second, fading. ``at`` is when it was last brought up to date."""

    at: float
    value: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Count ``seconds`` of use that end ``now``."""
        self.value = self.value * math.exp((self.at - now) / MEMORY_SECONDS) + seconds / MEMORY_SECONDS
        self.at = now


@dataclass(slots=True)
class _Sender:
    """Use of one sender. ``debt`` is what it has used beyond its part, in seconds, as of ``rate.at``."""

    rate: _Rate
    is_stranger: bool
    debt: float = 0.0
    part: float = 1.0
    in_progress: int = 0
    waiting: "OrderedDict[asyncio.Future[None], float]" = field(default_factory=OrderedDict)
    """Turns that requests wait for, first come first, and what each is charged at its beginning, in seconds."""
    timer: asyncio.TimerHandle | None = None


class LoopTime:
    """Use of one event loop by sender. A sender without requests, debt and use of late takes no memory."""

    def __init__(self) -> None:
        now = monotonic()
        self._senders: dict[str, _Sender] = {}
        self._tenants: OrderedDict[bytes, TenantId] = OrderedDict()
        """Tenants of the keys and web sessions seen last, by the secret's digest."""
        self._all = _Rate(now)
        """Use by all senders."""
        self._own = _Rate(now)
        """Processor time of this process that no request was charged for: its passes, samples and writes."""
        self._process_time = process_time()
        self._charged = 0.0
        """Time charged since ``_process_time`` was read."""
        self._tenants_in_use = self._strangers = 0
        """Numbers of senders that share the time."""

    def know(self, secret: str | None, tenant: TenantId) -> None:
        """Count requests with ``secret``, a key or a web session's that was found valid, as the tenant's."""
        if secret is None:
            return
        digest = _digest(secret)
        self._tenants[digest] = tenant
        self._tenants.move_to_end(digest)
        if len(self._tenants) > _MOST_SECRETS:
            self._tenants.popitem(last=False)

    def forget(self, secret: str | None) -> None:
        """Count requests with ``secret``, which is not valid, as those of their address."""
        if secret is not None:
            self._tenants.pop(_digest(secret), None)

    def name_of(self, scope: Scope) -> tuple[str, bool]:
        """Return the name of a request's sender, and whether neither its key nor its web session is known."""
        headers = Headers(scope=scope)
        for secret in (presented_key(headers), *(presented_session(headers, name) for name in COOKIES)):
            if secret is not None and (tenant := self._tenants.get(_digest(secret))) is not None:
                return _name(tenant), False
        address = network_of(scope)
        # Probes of health tell whether the process lives, beside whatever else comes from their address.
        return (f"health {address}" if scope["path"].endswith(_HEALTH) else f"address {address}"), True

    def enter(self, name: str, *, is_stranger: bool) -> _Sender:
        """Note that a request of the sender is in progress, until ``leave``."""
        sender = self._senders.get(name)
        if sender is None:
            sender = self._senders[name] = _Sender(_Rate(monotonic()), is_stranger)
        sender.in_progress += 1
        return sender

    @contextmanager
    def used_by(self, tenant: TenantId) -> Iterator[_Sender]:
        """Note that work of the tenant beside the loop is in progress inside the block, and yield the tenant's account."""
        sender = self.enter(_name(tenant), is_stranger=False)
        try:
            yield sender
        finally:
            self.leave(sender)

    def charge(self, sender: _Sender, seconds: float) -> None:
        """Count ``seconds`` of the loop's time as the sender's, and pay its debt off by its part of the time since."""
        now = monotonic()
        self._all.add(seconds, now)
        self._charged += seconds
        self._pay(sender, seconds, now)
        if now - self._own.at >= _LOOK_SECONDS:
            self._look(now)

    def charge_tenant(self, tenant: str, seconds: float) -> None:
        """Count ``seconds`` of a core, used beside the loop, as the tenant's."""
        with self.used_by(TenantId(tenant)) as sender:
            self.charge(sender, seconds)

    def _pay(self, sender: _Sender, seconds: float, now: float) -> None:
        paid = (now - sender.rate.at) * sender.part
        sender.rate.add(seconds, now)
        sender.debt = max(0.0, sender.debt + seconds - paid)
        sender.part = self.part_of(sender)

    def part_of(self, sender: _Sender) -> float:
        """Return which part of the loop's time the sender may take.

        A tenant leaves what the others and the service's own work have used of late several times over; whatever they use,
        it has an even part, one part being the own work's. All strangers together count as one, and divide their part.
        """
        if sender.is_stranger:
            return STRANGERS_PART / max(1, self._strangers + (sender.rate.value < _IN_USE))
        others = self._tenants_in_use - (sender.rate.value >= _IN_USE) + bool(self._strangers)
        in_use = max(0.0, self._all.value - sender.rate.value) + self._own.value
        return max(_LEAST_PART, 1.0 / (max(0, others) + 2), 1.0 - _RESERVE * in_use)

    def _look(self, now: float) -> None:
        """Bring all rates up to date, and forget senders that are quiet."""
        used = process_time()
        self._own.add(max(0.0, used - self._process_time - self._charged), now)
        self._process_time, self._charged = used, 0.0
        self._all.add(0.0, now)
        self._tenants_in_use = self._strangers = 0
        for name, sender in list(self._senders.items()):
            self._pay(sender, 0.0, now)
            if sender.rate.value >= _IN_USE:
                self._strangers += sender.is_stranger
                self._tenants_in_use += not sender.is_stranger
            if not (sender.in_progress or sender.debt or sender.rate.value >= _FORGOTTEN):
                del self._senders[name]

    async def turn(
        self,
        sender: _Sender,
        cost: float,
        *,
        most_waiting: float = math.inf,
        patience: float | None = None,
        has_begun: bool = False,
    ) -> None:
        """Wait until the sender is no more than a burst beyond its part, and charge it ``cost`` seconds.

        A request that ``has_begun``, and holds its body, goes before those that have not. Raises ``TooManyRequests`` at once if
        ``most_waiting`` wait already, and after ``patience`` seconds; None: never.
        """
        self.charge(sender, 0.0)
        if not sender.waiting and sender.debt <= BURST_SECONDS * sender.part:
            self.charge(sender, cost)
            return
        if len(sender.waiting) >= most_waiting:
            told = "of your requests wait for their turn; send this one again once they have been answered"
            raise TooManyRequests(f"{most_waiting} {told}")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sender.waiting[turn] = cost
        if has_begun:
            sender.waiting.move_to_end(turn, last=False)
        self._wake_later(sender)
        try:
            async with asyncio.timeout(patience):
                await turn
        except TimeoutError:
            raise _overdrawn(sender, patience) from None
        finally:
            sender.waiting.pop(turn, None)

    def _wake_later(self, sender: _Sender) -> None:
        if sender.timer is None and sender.waiting:
            # Until the debt is paid, not only small enough for one: those that then begin together are written and read together.
            seconds = max(_LEAST_WAIT_SECONDS, sender.debt / sender.part)
            sender.timer = asyncio.get_running_loop().call_later(seconds, self._wake, sender)

    def _wake(self, sender: _Sender) -> None:
        """Let those of the sender's requests begin for which the debt is small enough by now."""
        sender.timer = None
        self.charge(sender, 0.0)
        while sender.waiting and sender.debt <= BURST_SECONDS * sender.part:
            turn, cost = sender.waiting.popitem(last=False)
            # A request that was given up has cancelled its turn.
            if not turn.done():
                self.charge(sender, cost)
                turn.set_result(None)
        self._wake_later(sender)

    def leave(self, sender: _Sender) -> None:
        """Note that the request is answered."""
        sender.in_progress -= 1


def _overdrawn(sender: _Sender, patience: float | None) -> TooManyRequests:
    """Return the error of a request that has waited for too long."""
    error = TooManyRequests(
        f"your requests of late took more than your part of this server's time, and this one has waited {patience:g} s for its "
        "turn; send it again later, and fewer at a time"
    )
    error.retry_after = max(1, min(_LONGEST_RETRY_SECONDS, math.ceil(sender.debt / sender.part)))
    return error


def _name(tenant: TenantId) -> str:
    return f"tenant {tenant}"


def _digest(secret: str) -> bytes:
    return blake2b(secret.encode(errors="surrogatepass"), digest_size=16).digest()
