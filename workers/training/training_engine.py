"""Record of one base model's trainer, the one thread that may change the trainer's states, and the trainer's telemetry."""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from engine.model.device import DeviceFailed, SelfTest
from engine.training.trainer import Trainer
from ledger.work_in_hand import WorkInHand
from telemetry.training import TrainingTelemetry
from workers.compute_thread import ComputeThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingEngine:
    """Parts that compute one base model's training.

    ``trainer`` is changed on ``compute`` only; ``pass_token_budget`` is the tokens of a pass that has all slots. ``self_test`` is
    None where one process cannot compute the base alone.
    """

    trainer: Trainer
    compute: ComputeThread
    telemetry: TrainingTelemetry
    pass_token_budget: int
    self_test: SelfTest | None = None
    in_hand: WorkInHand = field(default_factory=WorkInHand)

    @property
    def slot_token_budget(self) -> int:
        """Tokens of a pass on one slot."""
        return max(1, self.pass_token_budget // self.trainer.slots)

    @property
    def base_model(self) -> str:
        """Served name of the base model."""
        return self.trainer.base.facts.name

    async def check_device(self) -> None:
        """Run the self-test, after a failure that nobody foresaw. Raises ``DeviceFailed``.

        A test that could not be run, as while the host starts no thread, says nothing about the device: others go on.
        """
        if self.self_test is None:
            return
        try:
            await asyncio.to_thread(partial(self.compute.clock.timed, self.self_test.check))
        except DeviceFailed:
            self.telemetry.self_tested(has_passed=False)
            raise
        except (RuntimeError, MemoryError, OSError):
            log.exception("the self-test of base=%s could not be run; taken for passed", self.base_model)
            return
        self.telemetry.self_tested(has_passed=True)
