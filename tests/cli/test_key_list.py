"""``weft key list`` tells which keys nobody uses."""

from datetime import UTC, datetime, timedelta
from typing import get_args

from api.admin.keys import OperatorsKeyBody
from cli.keys import TenantRole, _line
from tenants.rights import SCOPES_OF_ROLES, TENANT_ROLES, Role

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def line(used: datetime | None, scopes: list[str] | None = None) -> str:
    """The line of a member's key that was last used then."""
    times = {"created_at": NOW - timedelta(days=400), "expires_at": None, "revoked_at": None, "last_used_at": used}
    bounds = dict.fromkeys(("projects", "base_models", "max_rank", "networks"))
    scopes = sorted(SCOPES_OF_ROLES[Role.MEMBER]) if scopes is None else scopes
    named = {"key_id": 1, "prefix": "tml-0123456789ab", "note": "ci", "role": Role.MEMBER, "scopes": scopes}
    limits = {"limits": {"requests_per_minute": 60}}
    return _line(OperatorsKeyBody.model_validate(named | times | bounds | limits | {"tenant_id": "t"}), NOW)


def test_a_key_that_was_never_used_or_not_for_ninety_days_says_so() -> None:
    assert "\tnever used\t" in line(None)
    assert "\tused 2026-03-02 23:59 (unused for 90 days)\t" in line(NOW - timedelta(days=90, minutes=1))
    assert "\tused 2026-03-03 00:00\t" in line(NOW - timedelta(days=90))
    assert "requests_per_minute=60" in line(None)


def test_a_key_whose_scopes_leave_nothing_of_its_role_is_listed_with_none() -> None:
    assert "\tmember scope=none " in line(None, [])
    assert "\tmember scope=read " in line(None, ["read"])
    assert "scope=" not in line(None)


def test_a_command_offers_every_role_that_a_tenants_key_may_have() -> None:
    assert get_args(TenantRole) == TENANT_ROLES
