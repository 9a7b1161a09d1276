"""No made-up request brings the admin API to a 5xx, with ids that exist and with others."""

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as bounded
from schemathesis.generation.case import Case

from store.settings import Settings
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant

EXAMPLES = 12


@pytest.fixture
def settings(settings: Settings, database_url: str) -> Settings:
    """The service's settings on each kind of database: PostgreSQL refuses what is too long for its column."""
    return settings.model_copy(update={"database_url": database_url})


async def test_made_up_requests_to_every_admin_route_are_never_5xx(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    document = (await admin.http.get("/openapi.json")).raise_for_status().json()
    schema, cases = schemathesis.openapi.from_dict(document), list[Case]()
    for operation in (one.ok() for one in schema.get_all_operations()):

        @bounded(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy())
        def collect(case: Case) -> None:
            cases.append(case)

        collect()
    assert len({case.operation.label for case in cases}) == sum(len(one) for one in document["paths"].values())
    run = await cats.run()
    operation = await cats.operation(run)
    known: dict[str, Any] = {
        "tenant_id": cats.id, "run_id": run, "session_id": run.partition(":")[0], "operation_id": operation, "key_id": 1
    }  # fmt: skip
    for case in cases:
        made_up = case.formatted_path
        existing = case.path
        for name, value in {**case.path_parameters, **known}.items():
            existing = existing.replace(f"{{{name}}}", str(value))
        for path in (made_up, existing):
            content = json.dumps(case.body, default=repr).encode() if isinstance(case.body, dict) else b"{}"
            query = {name: str(value) for name, value in case.query.items()}
            headers = {"X-API-Key": admin.key.secret, "If-Match": "*", "Content-Type": "application/json"}
            if "Idempotency-Key" in case.headers:
                headers["Idempotency-Key"] = "made up"
            answer = await admin.http.request(
                case.method, f"{admin.url}{path}", params=query, headers=headers, content=content
            )
            assert answer.status_code < 500, (case, path, answer.text)
    assert (await dogs.http.get("/sessions")).status_code == 200
