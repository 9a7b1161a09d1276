"""A sick sampling device gives the samples back: they stay pending, and the next process draws them."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sqlalchemy import func, select
from torch import Tensor

from contracts.base_model import read_base_model_facts
from contracts.errors import EngineFailure
from contracts.ledger_records import OperationState
from engine.model.base import BaseModel
from engine.model.device import DeviceFailed
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.replica import PromptScored, PromptScoring
from ledger.runtime import Runtime
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import SampleInFlight, WorkerProcess
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import BASE, SECONDS, make_drawer, make_sampling
from workers.base_forward import BaseForward, Prompt

Forward = Callable[..., Tensor]


@pytest.fixture
async def runtime(migrated_database: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    """A runtime on SQLite. Devices that are to hang may take a second for a turn."""
    shutil.copy(migrated_database, tmp_path / "weft.db")
    database = Database(create_engine(f"sqlite+aiosqlite:///{tmp_path}/weft.db"))
    made = make_runtime(database, tmp_path, utc_now)
    hangs = getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("fault") == "hang"
    limit = {"stall_limit": timedelta(seconds=1)} if hangs else {}
    yield replace(made, settings=made.settings.model_copy(update=limit))
    await database.close()


@pytest.mark.parametrize("fault", ["accelerator error", "wrong numbers", "broken turn", "hang"])
async def test_a_sick_sampling_device_gives_its_samples_back(
    runtime: Runtime, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    one, other = await make_drawer(runtime), await make_drawer(runtime)
    release, logits = Event(), base.logits
    monkeypatch.setattr("workers.sampling.replica_pool.WATCH_SECONDS", 0.2)

    def fail(*_: object) -> Tensor:
        if fault == "accelerator error":
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        if fault in ("wrong numbers", "broken turn"):
            raise RuntimeError("probability tensor contains inf or nan")
        release.wait(SECONDS)
        raise RuntimeError("released")

    sampling = make_sampling(runtime, base, tiny_model_dir)
    await sampling.pool.start()
    working, failing = (
        asyncio.create_task(sampling.worker.run()),
        asyncio.create_task(sampling.pool.until_failed()),
    )
    try:
        assert len((await one.result(await one.send(5))).sequences[0].tokens) <= 8
        # A turn that breaks beside its steps, too.
        where, call = (ContinuousBatcher, "turn") if fault == "broken turn" else (ForwardPass, "__call__")
        monkeypatch.setattr(where, call, fail)
        if fault in ("wrong numbers", "broken turn"):
            monkeypatch.setattr(base, "logits", lambda tokens: logits(tokens) * 2)
        sent = [(drawer, await drawer.send(5)) for drawer in (one, other)]
        async with asyncio.timeout(SECONDS):
            with pytest.raises(DeviceFailed):
                await failing
        await sampling.heartbeat.give_up()
        for drawer, request in sent:
            row = await drawer.row(request)
            assert (row.state, row.attempts) == (OperationState.PENDING, 1)
        async with runtime.database.read() as session:
            for table in (SampleInFlight, WorkerProcess):
                assert await session.scalar(select(func.count()).select_from(table)) == 0
    finally:
        release.set()
        monkeypatch.undo()
        sampling.worker.stop()
        await working
        await sampling.pool.close()
    healthy = make_sampling(runtime, base, tiny_model_dir)
    await healthy.pool.start()
    working = asyncio.create_task(healthy.worker.run())
    for drawer, request in sent:
        assert await drawer.result(request)
    healthy.worker.stop()
    await working
    await healthy.pool.close()


@pytest.mark.parametrize("step", ["_item", "_by_logits"])
async def test_a_prompt_for_which_there_is_no_memory_fails_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Prompts of several tenants are scored together."""
    forward = BaseForward(BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None)))
    scoring = PromptScoring(0, logprobs=True, topk=0 if step == "_item" else 2)
    prompts = [Prompt(None, np.array(ids), scoring) for ids in ([5, 2, 3], [7, 1, 4, 4], [2, 9])]
    alone = [forward.score_now(prompt) for prompt in prompts]
    whole = getattr(forward, step)

    def lacking(weights: object, prompt: Prompt) -> object:
        if prompt is prompts[1]:
            raise torch.OutOfMemoryError("no memory")
        return whole(weights, prompt)

    monkeypatch.setattr(forward, step, lacking)
    first, failed, last = forward.score_together(prompts)
    assert isinstance(failed, EngineFailure)
    for scored, expected in ((first, alone[0]), (last, alone[2])):
        assert isinstance(scored, PromptScored)
        np.testing.assert_allclose(scored.logprobs, expected.logprobs, atol=1e-5)


async def test_a_device_that_fails_in_a_score_ends_the_process(
    runtime: Runtime, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of memory fails its own prompt alone: the pool goes on, and the next prompt is scored."""
    monkeypatch.setattr("workers.sampling.replica_pool.WATCH_SECONDS", 0.05)
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    forward = BaseForward(base)
    sampling = make_sampling(runtime, base, tiny_model_dir, forward)
    scoring, prompt, looked = PromptScoring(0, logprobs=True, topk=0), np.array([5, 2, 3]), asyncio.Event()
    check = forward.check

    def look() -> None:
        check()
        looked.set()

    monkeypatch.setattr(forward, "check", look)
    async with asyncio.timeout(SECONDS):
        await sampling.pool.start()
        failing = asyncio.create_task(sampling.pool.until_failed())
        for error in (torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error: launch failure")):
            with monkeypatch.context() as sick:
                sick.setattr(forward, "_item", Mock(side_effect=error))
                with pytest.raises(EngineFailure, match="scoring failed"):
                    await forward.score(None, prompt, scoring)
            if isinstance(error, torch.OutOfMemoryError):
                looked.clear()
                await looked.wait()
                assert not failing.done()
                assert (await forward.score(None, prompt, scoring)).logprobs is not None
        with pytest.raises(DeviceFailed, match="launch failure"):
            await failing
    await sampling.pool.close()
