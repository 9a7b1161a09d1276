"""Statements of the creation of a session, a model and a sampler: each row is read once."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import event

from tests.api.conftest import BASE, Service, Tenant


@contextmanager
def sent_to(service: Service) -> Iterator[list[str]]:
    """Record the statements that the service sends meanwhile."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(" ".join(statement.split()))

    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def test_creations_read_each_row_once(cats: Tenant, dogs: Tenant, service: Service) -> None:
    with sent_to(service) as statements:
        opened = await cats.http.post("/create_session", json={"user_metadata": {"note": "x"}})
    session = opened.raise_for_status().json()["session_id"]
    assert sum("tenants.limits" in one for one in statements) == 2, "with the key, and where sessions are counted"
    model = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 1, "seed": 0}}
    with sent_to(service) as statements:
        first = (await cats.http.post("/create_model", json=model)).raise_for_status().json()
    assert sum(" FROM sessions" in one and one.startswith("SELECT") for one in statements) == 1
    assert not any(" FROM budgets" in one for one in statements), "a creation is accepted whatever is spent"
    assert sum("tenants.limits" in one for one in statements) == 1, "with the key"
    sampler = {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE}
    with sent_to(service) as statements:
        (await cats.http.post("/create_sampling_session", json=sampler)).raise_for_status()
    assert sum(" FROM sessions" in one and one.startswith("SELECT") for one in statements) == 1
    assert sum("tenants.limits" in one for one in statements) == 1, "with the key"
    # A repeat has the first answer, also once the session has ended; nobody else has either.
    assert (await dogs.http.post("/create_model", json=model)).status_code == 404
    (await cats.http.post(f"/sessions/{session}/finish", json={})).raise_for_status()
    assert (await cats.http.post("/create_model", json=model)).raise_for_status().json() == first
    refused = await cats.http.post("/create_model", json=model | {"model_seq_id": 1})
    assert refused.json()["code"] == "session_ended"
    other = await cats.http.post("/create_model", json=model | {"base_model": BASE, "lora_config": {"rank": 2}})
    assert other.json()["code"] == "sequence_conflict"
