"""List of finished samples: the tenant's own, newest first and page by page, with the numbers of their reports."""

from datetime import timedelta

from contracts.ids import RequestId, SessionId
from contracts.ledger_records import OperationState
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from store.tables import Operation
from tenants import finished_samples
from tenants.sample_reports import record_reports
from tenants.samplers import NewSampler, create_sampler

PATH = "/api/weft/v1/samples"
REPORT = SampleReport(
    [SequenceReport("abort", [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 5)])], ["one"], 2, 0.5, 1.5
)


async def sampled(tenant, ids: list[str], *, kind: str = "sample", error: str | None = None) -> None:
    """Record operations of the tenant that ended one after the other, with reports unless they failed."""
    service = tenant.service
    session = await tenant.session()
    async with service.database.write() as transaction:
        sampler = await create_sampler(
            transaction, tenant.id, NewSampler(SessionId(session), 0, "test/tiny"), service.clock
        )
        for number, id in enumerate(ids):
            now = service.clock() + timedelta(seconds=number)
            transaction.add(
                Operation(
                    id=id,
                    tenant_id=tenant.id,
                    lane=sampler,
                    seq_id=number,
                    kind=kind,
                    base_model="test/tiny",
                    state=OperationState.DONE if error is None else OperationState.FAILED,
                    body_digest=b"",
                    tokens=8,
                    sampled_tokens=5,
                    created_at=now,
                    finished_at=now,
                    error_code=error,
                )
            )
        await transaction.flush()
        if error is None:
            await record_reports(transaction, [(tenant.id, RequestId(id), REPORT) for id in ids])


async def test_a_tenant_lists_its_own_samples_page_by_page(cats, dogs, service) -> None:
    await sampled(cats, ["one", "two", "three"])
    await sampled(cats, ["passed"], kind="forward")
    await sampled(dogs, ["theirs"])
    found, after = [], {}
    while True:
        page = (await cats.http.get(service.url + PATH, params={"limit": 2, **after})).raise_for_status().json()
        found += page["samples"]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [one["request_id"] for one in found] == ["three", "two", "one"]
    first = found[0]
    assert (first["attempts"], first["queue_seconds"], first["decode_seconds"]) == (2, 0.5, 1.5)
    assert (first["stop_reasons"], first["versions"]) == (["abort"], ["v1", "v2"])
    assert (first["prompt_tokens"], first["sampled_tokens"]) == (3, 5)
    assert (await cats.http.get(service.url + PATH, params={"after": "theirs"})).status_code == 404


async def test_samples_behind_many_passes_are_on_a_later_page(cats, dogs, service, monkeypatch) -> None:
    monkeypatch.setattr(finished_samples, "SEARCHED", 3)
    await sampled(cats, ["old"])
    service.clock.move(hours=1)
    await sampled(cats, [f"pass {number}" for number in range(4)], kind="forward")
    await sampled(dogs, ["theirs"], error="cancelled")
    page = (await cats.http.get(service.url + PATH)).json()
    assert (page["samples"], page["next"] is None) == ([], False)
    page = (await cats.http.get(service.url + PATH, params={"after": page["next"]})).json()
    assert ([one["request_id"] for one in page["samples"]], page["next"]) == (["old"], None)
    (theirs,) = (await dogs.http.get(service.url + PATH)).json()["samples"]
    assert (theirs["error_code"], theirs["attempts"]) == ("cancelled", None)
