"""The unmodified SDK reads what weft lists: its validation is strict."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
import tinker

from engine.contracts.paths import Segment

pytestmark = pytest.mark.asyncio


async def _result(future: Future[Any] | Any) -> Any:
    return await asyncio.to_thread(future.result, 30)


async def test_rest_client_reads_and_deletes(cats, dogs, service, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    run, foreign = await cats.run(), await dogs.run()
    await cats.checkpoint(run, "ck1")
    await cats.checkpoint(run, "ck1", segment=Segment.SAMPLER_WEIGHTS)
    rest = await asyncio.to_thread(tinker.RestClient, base_url=service.url, api_key=cats.key)

    runs = await _result(rest.list_training_runs())
    assert [one.training_run_id for one in runs.training_runs] == [run]
    assert (await _result(rest.get_training_run(run))).last_checkpoint.tinker_path == f"tinker://{run}/weights/ck1"
    assert len((await _result(rest.list_checkpoints(run))).checkpoints) == 2
    assert len((await _result(rest.list_user_checkpoints())).checkpoints) == 2
    session_id = run.partition(":")[0]
    assert (await _result(rest.get_session(session_id))).training_run_ids == [run]
    assert (await _result(rest.list_sessions())).sessions[-1] == session_id

    path = f"tinker://{run}/weights/ck1"
    await _result(rest.set_checkpoint_ttl_from_tinker_path(path, 3600))
    await _result(rest.delete_checkpoint(run, "weights/ck1"))
    assert len((await _result(rest.list_user_checkpoints())).checkpoints) == 1
    with pytest.raises(tinker.NotFoundError):
        await _result(rest.get_training_run(foreign))
    with pytest.raises(tinker.NotFoundError):
        await _result(rest.publish_checkpoint_from_tinker_path(f"tinker://{run}/sampler_weights/ck1"))


async def test_capabilities_and_key_rules(cats, service, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    rest = await asyncio.to_thread(tinker.RestClient, base_url=service.url, api_key=cats.key)
    models = (await _result(rest.get_server_capabilities())).supported_models
    assert [one.model_name for one in models] == ["test/tiny"]
    with pytest.raises(tinker.AuthenticationError):
        await asyncio.to_thread(tinker.RestClient, base_url=service.url, api_key="tml-wrong")
