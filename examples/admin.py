"""An operator's day in one program: a tenant is made, bounded, looked at, suspended and deleted, over the admin API.

``WEFT_ADMIN_URL`` and ``WEFT_ADMIN_KEY`` name the service: see docs/how-to/operate-over-http.md.
"""

import argparse

from weft_client import WeftAdmin


def main() -> None:
    """Run the day with a tenant of that name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenant", default="example")
    name = parser.parse_args().tenant
    with WeftAdmin() as admin:
        made = admin.tenants.create(name, idempotency_key=f"example-{name}")
        tenant = made.tenant.id
        admin.tenants.change(tenant, limits={"sessions": 8}, service_class="batch")
        admin.tenants.set_budget(tenant, "month", 10_000_000)
        for limit in admin.tenants.standing(tenant).limits:
            if limit.is_own:
                print(f"limit {limit.name}: {limit.used} of {limit.value}")
        admin.tenants.suspend(tenant, mode="read_only", reason="the invoice is open")
        admin.tenants.resume(tenant)
        marked = admin.tenants.delete(tenant, grace_seconds=86_400)
        print(f"{marked.name} is deleted from {marked.delete_at} on")
        admin.tenants.restore(tenant)
        for entry in reversed(list(admin.audit.entries(tenant=tenant))):
            print(f"{entry.at:%H:%M:%S} {entry.actor} {entry.action}")


if __name__ == "__main__":
    main()
