"""A replay for which the device has no memory: the run's state is kept, and its next operation brings it back."""

import pytest
import torch

from contracts.errors import EngineFailure
from contracts.operations import OptimStepped
from engine.model.base import BaseModel
from tests.workers.training.conftest import NewRig, undisturbed
from tests.workers.training.test_residency import STEP, assert_bit_equal, batch


async def test_a_replay_that_finds_no_memory_loses_no_state(new_rig: NewRig, base: BaseModel) -> None:
    rig, lacks_memory = new_rig(), False

    def fail(_module: object, _inputs: object) -> None:
        if lacks_memory:
            raise torch.OutOfMemoryError

    hook = base.model.base_model.register_forward_pre_hook(fail)
    try:
        async with rig.running():
            replayed, other = await rig.clients("replayed", "other")
            for one in (replayed, other):
                await one.do(batch(1))
                await one.do(STEP)
            rig.worker.outcomes.drop(replayed.run)
            lacks_memory = True
            with pytest.raises(EngineFailure, match="its state is kept"):
                await replayed.do(STEP)
            assert isinstance(await other.do(STEP), OptimStepped)
            lacks_memory = False
            assert isinstance(await replayed.do(STEP), OptimStepped)
            assert_bit_equal(replayed.state(), undisturbed(base, replayed.lora, [batch(1), STEP, STEP]))
    finally:
        hook.remove()
