"""Rights of API keys: roles, scopes and bounds, and the principal that a request acts as.

A key's right is what its role has, its scopes leave and its bounds allow. Nothing here is cached: rights are read with the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from ipaddress import ip_address, ip_network

from contracts.errors import Forbidden, Suspended, TenantHeld, WeftError
from contracts.ids import TenantId
from contracts.stored_words import known
from tenants.rates import Meter, pace_of
from tenants.reach import Owner, Reach, default_project
from tenants.request_rates import REQUEST_RATE


class Scope(StrEnum):
    """Kind of thing that a key may do."""

    READ = "read"
    TRAIN = "train"
    SAMPLE = "sample"
    CHECKPOINTS_WRITE = "checkpoints.write"
    CHECKPOINTS_DOWNLOAD = "checkpoints.download"
    GATES = "gates"
    USAGE = "usage"
    KEYS = "keys"
    AUDIT = "audit"
    PROJECTS = "projects"
    WEBHOOKS = "webhooks"


class Role(StrEnum):
    """Role of a key in its tenant; each has all that those before it have, except that an admin has it all.

    ``operator`` is reserved for the service's own operators: no tenant's key has it.
    """

    VIEWER = "viewer"
    MEMBER = "member"
    BILLING = "billing"
    ADMIN = "admin"
    OPERATOR = "operator"
    UNKNOWN = "unknown"
    """A stored role that only another version knows. It has no scope here, and no key is given it."""


_VIEWER = frozenset({Scope.READ})
_MEMBER = _VIEWER | {
    Scope.TRAIN,
    Scope.SAMPLE,
    Scope.CHECKPOINTS_WRITE,
    Scope.CHECKPOINTS_DOWNLOAD,
    Scope.GATES,
}
SCOPES_OF_ROLES: Mapping[Role, frozenset[Scope]] = {
    Role.VIEWER: _VIEWER,
    Role.MEMBER: _MEMBER,
    Role.BILLING: _MEMBER | {Scope.USAGE},
    Role.ADMIN: frozenset(Scope),
    Role.OPERATOR: frozenset(),
    Role.UNKNOWN: frozenset(),
}
TENANT_ROLES = (Role.VIEWER, Role.MEMBER, Role.BILLING, Role.ADMIN)
"""Roles that a tenant's key may have."""


@dataclass(frozen=True, slots=True)
class KeyRights:
    """Role and bounds of a key. None is no bound.

    - ``projects``: ids of the projects whose rows the key reaches.
    - ``networks``: addresses, as CIDR, that the key may be used from.
    - ``limits``: rates of the key, by name (``tenants.rate_lines``).
    """

    role: Role = Role.MEMBER
    scopes: frozenset[Scope] | None = None
    projects: frozenset[str] | None = None
    expires_at: datetime | None = None
    base_models: frozenset[str] | None = None
    max_rank: int | None = None
    networks: tuple[str, ...] | None = None
    limits: Mapping[str, int] | None = None

    @property
    def effective_scopes(self) -> frozenset[Scope]:
        """Scopes that the role has and the key's own scopes leave."""
        of_role = SCOPES_OF_ROLES[self.role]
        return of_role if self.scopes is None else of_role & self.scopes

    def excess(self, other: "KeyRights") -> str | None:
        """Return what ``other`` may beyond this key, in words; None if it may nothing beyond."""
        if more := other.effective_scopes - self.effective_scopes:
            return f"scope {min(more)}"
        if not _is_within(other.projects, self.projects):
            return "projects"
        if not _is_within(other.base_models, self.base_models):
            return "base_models"
        if self.max_rank is not None and (other.max_rank is None or other.max_rank > self.max_rank):
            return "max_rank"
        if self.expires_at is not None and (other.expires_at is None or other.expires_at > self.expires_at):
            return "expires_at"
        if self.networks is not None and not _is_inside(other.networks, self.networks):
            return "networks"
        if _asks_more(self.limits, other.limits):
            return REQUEST_RATE
        return next((name for meter in Meter if (name := _faster(self.limits, other.limits, meter)) is not None), None)


def _asks_more(own: Mapping[str, int] | None, other: Mapping[str, int] | None) -> bool:
    bound, asked = ((limits or {}).get(REQUEST_RATE, 0) for limits in (own, other))
    return bool(bound) and not 0 < asked <= bound


def _faster(own: Mapping[str, int] | None, other: Mapping[str, int] | None, meter: Meter) -> str | None:
    """Return the name of a limit by which ``other`` lets more of the meter through, None if it does not."""
    bound, asked = pace_of(own, meter), pace_of(other, meter)
    if bound is None:
        return None
    if asked is None or asked.per_second > bound.per_second:
        return f"{meter}_tokens_per_minute"
    return f"{meter}_tokens_burst" if asked.burst > bound.burst else None


def _is_within(inner: frozenset[str] | None, outer: frozenset[str] | None) -> bool:
    return outer is None or (inner is not None and inner <= outer)


def _is_inside(inner: tuple[str, ...] | None, outer: tuple[str, ...]) -> bool:
    if inner is None:
        return False
    around = [ip_network(one) for one in outer]
    return all(any(_holds(wide, ip_network(one)) for wide in around) for one in inner)


def _holds(wide: object, narrow: object) -> bool:
    # Networks of two versions of IP cannot be compared.
    return type(wide) is type(narrow) and narrow.subnet_of(wide)  # type: ignore[attr-defined]


class SuspendMode(StrEnum):
    """Mode of a tenant's suspension; each refuses all that those before it refuse.

    - ``hold``: accepted work waits, new work is accepted and waits too.
    - ``read_only``: new work and changes are refused. Results, lists, downloads, deletions and what ends something go on.
    - ``blocked``: every request is refused.
    """

    HOLD = "hold"
    READ_ONLY = "read_only"
    BLOCKED = "blocked"


LENIENT = (SuspendMode.HOLD, SuspendMode.READ_ONLY)
"""Modes in which a tenant may read. One that only another version knows is not among them."""


def known_mode(text: str | None) -> SuspendMode:
    """Return the stored mode, ``hold`` for none. One that only another version knows counts as the strictest."""
    return known(SuspendMode, text or SuspendMode.HOLD, SuspendMode.BLOCKED)


class Via(StrEnum):
    """Means by which a request has shown its key: the ``key`` itself, a ``token`` that stands for it, or a ``ui`` session."""

    KEY = "key"
    TOKEN = "token"
    UI = "ui"


@dataclass(frozen=True, slots=True)
class Principal:
    """Party that a request acts as: a tenant, by one of its keys, with the key's rights.

    - ``prefix``: the key's first part, which is no secret. ``address``: where the request came from, None over a Unix socket.
    - ``suspension``: mode in which the tenant is suspended, None if it is not; ``reason`` is what its clients read.
    """

    tenant: TenantId
    key_id: int
    rights: KeyRights
    prefix: str
    address: str | None = None
    via: Via = Via.KEY
    suspension: SuspendMode | None = None
    reason: str | None = None
    pauses_unpaid: bool = True
    """False for a client that takes 402 as final: its work is accepted and waits for the budget instead."""
    budget_key: int | None = None
    tenant_limits: Mapping[str, int] | None = None
    """Limits that the tenant has of its own (``tenants.limits``)."""

    @property
    def payer(self) -> int:
        """Key of whose budgets the principal's work spends (``tenants.budgets.payer_of``)."""
        return self.budget_key or self.key_id

    @property
    def role(self) -> Role:
        """Role of the key."""
        return self.rights.role

    @property
    def scopes(self) -> frozenset[Scope]:
        """Scopes that the key has in effect."""
        return self.rights.effective_scopes

    @property
    def projects(self) -> frozenset[str] | None:
        """Projects that the key reaches; None: all of the tenant's."""
        return self.rights.projects

    @property
    def reach(self) -> Owner:
        """Rows that the key reaches."""
        return self.tenant if self.rights.projects is None else Reach(self.tenant, self.rights.projects)

    @property
    def may_work(self) -> bool:
        """True for a key that may train or sample."""
        return not self.scopes.isdisjoint({Scope.TRAIN, Scope.SAMPLE})

    @property
    def home_project(self) -> str | None:
        """Project of sessions that name none, None for the tenant's default project.

        Raises ``Forbidden`` for a key of several others.
        """
        if self.projects is None or default_project(self.tenant) in self.projects:
            return None
        if len(self.projects) > 1:
            raise Forbidden("this key is for several projects; name one of them as project_id, or use a key for one")
        return min(self.projects)

    def check(self, *any_of: Scope) -> None:
        """Raise ``Forbidden`` unless the key has one of the scopes; none named: every key may."""
        if any_of and self.scopes.isdisjoint(any_of):
            wanted = " or ".join(any_of)
            had = ", ".join(sorted(self.scopes)) or "none"
            raise Forbidden(
                f"this needs the scope {wanted}, and your key of role {self.role} has: {had}; use a key that has it"
            )

    def check_address(self) -> None:
        """Raise ``Forbidden`` unless the key may be used from the request's address."""
        networks = self.rights.networks
        if networks is not None and not _is_from(self.address, networks):
            raise Forbidden(f"this key may be used only from {', '.join(networks)}; send the request from there")

    def check_not_blocked(self) -> None:
        """Raise ``Suspended`` if the tenant is blocked."""
        if self.suspension is SuspendMode.BLOCKED:
            raise blocked(self.reason)

    def check_new_work(self) -> None:
        """Raise ``Suspended`` if the tenant is read-only."""
        if self.suspension is SuspendMode.READ_ONLY:
            raise read_only(self.reason)

    def check_base(self, base_model: str) -> None:
        """Raise ``Forbidden`` for a base model that the key is not for."""
        allowed = self.rights.base_models
        if allowed is not None and base_model not in allowed:
            raise Forbidden(
                f"this key is only for the base models {', '.join(sorted(allowed))}; not {base_model[:300]!r}"
            )

    def check_rank(self, rank: int, tenants: int) -> None:
        """Raise ``Forbidden`` for an adapter of a higher rank than the key's bound, or than its tenant's (0: none)."""
        most = self.rights.max_rank
        if most is not None and rank > most:
            raise Forbidden(f"this key makes adapters of rank {most} at most; got rank {rank}")
        if 0 < tenants < rank:
            raise Forbidden(f"your limit max_rank lets you make adapters of rank {tenants} at most; got rank {rank}")

    def obstacle_of_work(self, base_model: str) -> WeftError | None:
        """Return the error that new work on ``base_model`` ends with; None if the key may have it done."""
        try:
            self.check_new_work()
            self.check_base(base_model)
        except Forbidden as refusal:
            return refusal
        return None

    @property
    def held(self) -> TenantHeld | None:
        """Error of work whose client cannot be told that it waits, None unless the tenant's work is held."""
        if self.suspension is not SuspendMode.HOLD:
            return None
        return TenantHeld(f"this tenant's work is held, so send the request again later: {self._told}")

    @property
    def _told(self) -> str:
        return _told(self.reason)


def blocked(reason: str | None) -> Suspended:
    """Return the error of a blocked tenant's requests."""
    return Suspended(f"this tenant is blocked: {_told(reason)}")


def read_only(reason: str | None) -> Suspended:
    """Return the error of a read-only tenant's new work."""
    return Suspended(f"this tenant is read-only, so it takes no new work and no changes: {_told(reason)}")


def _told(reason: str | None) -> str:
    return reason or "ask the service's operator why"


def _is_from(address: str | None, networks: tuple[str, ...]) -> bool:
    try:
        found = ip_address(address or "")
    except ValueError:
        # A Unix socket has no address, and no network holds it.
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in ip_network(network) for network in networks)
