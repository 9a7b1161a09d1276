import asyncio
from datetime import timedelta

import httpx
import numpy as np
import pytest
from sqlalchemy import delete, select

from contracts.errors import EngineFailure
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, OperationKind, OptimStepped, TrainingBatch
from ledger.ledger import Ledger
from ledger.pruning import prune
from ledger.wakeups import Wakeups, operation_topic
from store.settings import Settings
from store.tables import Operation, OperationResult

PROTOBUF = "application/x-protobuf"


async def _retrieve(tenant, request_id: str, *, accept: str = "application/json", **body: object) -> httpx.Response:
    return await tenant.http.post(
        "/retrieve_future", json={"request_id": request_id, **body}, headers={"Accept": accept}
    )


async def _large_forward_backward(tenant) -> str:
    """A done forward_backward whose result is above ``metadata_only_bytes``."""
    run = await tenant.run()
    request_id = await tenant.operation(
        run, kind=OperationKind.FORWARD_BACKWARD, payload=TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])
    )
    logprobs = [np.full(30_000, -0.5, dtype=np.float32)]
    await tenant.service.run_next(ForwardBackwardOutput(logprobs, {"loss:sum": 1.5}))
    return request_id


class TestPending:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"poll_hold": timedelta(milliseconds=20)})

    async def test_pending_is_408_with_queue_state(self, cats) -> None:
        request_id = await cats.operation(await cats.run())
        response = await _retrieve(cats, request_id)
        assert response.status_code == 408
        body = response.json()
        assert (body["type"], body["request_id"], body["queue_state"]) == ("try_again", request_id, "paused_capacity")
        assert "no trainer of test/tiny is there" in body["queue_state_reason"]

    async def test_poll_of_a_later_seq_id_while_an_earlier_is_missing_is_408(self, cats) -> None:
        request_id = await cats.operation(await cats.run(), seq_id=3)
        assert (await _retrieve(cats, request_id)).status_code == 408


async def test_held_poll_is_woken_by_the_completion(cats, service) -> None:
    request_id = await cats.operation(await cats.run())
    polls = [asyncio.create_task(_retrieve(cats, request_id)) for _ in range(3)]
    await service.wakeups.until_listened(operation_topic(request_id))
    async with asyncio.timeout(10):
        await service.run_next(OptimStepped({"grad_norm": 2.0}))
        answers = await asyncio.gather(*polls)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json()["metrics"] == {"grad_norm": 2.0}


async def test_result_can_be_polled_again(cats, service) -> None:
    request_id = await cats.operation(await cats.run())
    await service.run_next(OptimStepped({}))
    assert (await _retrieve(cats, request_id)).content == (await _retrieve(cats, request_id)).content


async def test_failure_is_200_with_its_category(cats, service) -> None:
    request_id = await cats.operation(await cats.run())
    await service.run_next(EngineFailure("the pass failed"))
    response = await _retrieve(cats, request_id, allow_metadata_only=True)
    assert (response.status_code, response.json()) == (200, {"error": "the pass failed", "category": "server"})


async def test_large_result_is_announced_then_sent(cats) -> None:
    request_id = await _large_forward_backward(cats)
    announced = (await _retrieve(cats, request_id, accept=PROTOBUF, allow_metadata_only=True)).json()
    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] >= 4 * 30_000
    sent = await _retrieve(cats, request_id, accept=PROTOBUF, allow_metadata_only=False)
    assert (sent.status_code, sent.headers["content-type"]) == (200, PROTOBUF)
    assert len(sent.content) >= 4 * 30_000


async def test_small_result_is_never_only_announced(cats, service) -> None:
    request_id = await cats.operation(await cats.run())
    await service.run_next(OptimStepped({"grad_norm": 2.0}))
    assert (await _retrieve(cats, request_id, allow_metadata_only=True)).json()["metrics"] == {"grad_norm": 2.0}


async def test_result_is_json_unless_protobuf_is_accepted(cats) -> None:
    request_id = await _large_forward_backward(cats)
    plain = await _retrieve(cats, request_id)
    assert plain.headers["content-type"] == "application/json"
    assert plain.json()["metrics"] == {"loss:sum": 1.5}
    both = await _retrieve(cats, request_id, accept=f"{PROTOBUF}, application/json")
    assert both.headers["content-type"] == PROTOBUF


async def test_pruned_result_is_410(cats, service, clock) -> None:
    request_id = await cats.operation(await cats.run())
    await service.run_next(OptimStepped({}))
    clock.move(hours=3)
    async with service.database.write() as transaction:
        await prune(transaction, finished_before=clock() - timedelta(hours=1), now=clock())
    response = await _retrieve(cats, request_id)
    assert (response.status_code, response.json()["code"]) == (410, "future_gone")


async def test_pruned_failure_keeps_its_reason(cats, service, clock) -> None:
    request_id = await cats.operation(await cats.run())
    await service.run_next(EngineFailure("the pass failed"))
    clock.move(hours=3)
    async with service.database.write() as transaction:
        await prune(transaction, finished_before=clock() - timedelta(hours=1), now=clock())
    assert (await _retrieve(cats, request_id)).json()["error"] == "the pass failed"


async def test_a_repeat_of_a_forgotten_request_is_410_and_does_nothing(cats, dogs, service) -> None:
    """Recorded again it would wait for ever behind its model. The other tenant's repeat finds its row."""
    mine, theirs = [{"model_id": await tenant.run(), "seq_id": 1} for tenant in (cats, dogs)]
    for tenant, asked in ((cats, mine), (dogs, theirs)):
        assert (await tenant.http.post("/optim_step", json=asked)).status_code == 200
        await service.run_next(OptimStepped({}))
    of_mine = Operation.lane == mine["model_id"], Operation.seq_id == 1
    async with service.database.write() as transaction:
        await transaction.execute(delete(Operation).where(*of_mine))
    repeated = await cats.http.post("/optim_step", json=mine)
    assert (repeated.status_code, repeated.json()["code"]) == (410, "future_gone")
    assert "go on with seq_id 2" in repeated.json()["detail"]
    async with service.database.read() as session:
        assert (await session.scalars(select(Operation).where(*of_mine))).all() == []
    assert (await dogs.http.post("/optim_step", json=theirs)).status_code == 200
    assert (await cats.http.post("/optim_step", json={**mine, "seq_id": 2})).status_code == 200


async def _state(service, request_id: str) -> tuple[object, ...]:
    async with service.database.read() as session:
        row = (await session.execute(select(Operation.__table__).where(Operation.id == request_id))).one()
        body = await session.scalar(select(OperationResult.body).where(OperationResult.operation_id == request_id))
    return (*row, body)


async def test_foreign_poll_is_404_at_once_and_has_no_side_effect(cats, dogs, service) -> None:
    request_id = await cats.operation(await cats.run())
    before = await _state(service, request_id)
    async with asyncio.timeout(10):
        pending = await _retrieve(dogs, request_id)
    assert (pending.status_code, pending.json()["code"]) == (404, "not_found")
    assert await _state(service, request_id) == before
    await service.run_next(OptimStepped({"grad_norm": 2.0}))
    done = await _state(service, request_id)
    finished = await _retrieve(dogs, request_id, allow_metadata_only=True)
    assert finished.json() == pending.json()
    assert await _state(service, request_id) == done
    assert (await _retrieve(cats, request_id)).json()["metrics"] == {"grad_norm": 2.0}


@pytest.mark.parametrize("request_id", ["", "nothing", "x" * 5000])
async def test_unknown_request_is_404(cats, request_id: str) -> None:
    response = await _retrieve(cats, request_id)
    assert response.status_code == 404
    assert len(response.text) < 300


async def test_missing_request_id_is_named(cats) -> None:
    response = await cats.http.post("/retrieve_future", json={})
    assert (response.status_code, response.json()["detail"]) == (400, "request_id: Field required")


async def test_result_survives_a_new_ledger(cats, service) -> None:
    """Nothing but rows is needed: a restarted process answers the same."""
    request_id = await cats.operation(await cats.run())
    await service.run_next(OptimStepped({"grad_norm": 2.0}))
    runtime = service.services.runtime
    again = Ledger(service.database, Wakeups(), service.clock, runtime.telemetry, runtime.ledger.payloads)
    status = await again.status(cats.id, request_id)
    assert await again.result(cats.id, status) == OptimStepped({"grad_norm": 2.0})
