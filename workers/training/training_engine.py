"""Record of one base model's trainer, the one thread that may change the trainer's states, and the trainer's telemetry."""

from dataclasses import dataclass, field

from engine.training.trainer import Trainer
from telemetry.training import TrainingTelemetry
from workers.compute_thread import ComputeThread
from workers.leases.work_in_hand import WorkInHand


@dataclass(frozen=True, slots=True)
class TrainingEngine:
    """Parts that compute one base model's training.

    ``trainer`` is changed on ``compute`` only; ``pass_token_budget`` is the tokens of a pass that has all slots.
    """

    trainer: Trainer
    compute: ComputeThread
    telemetry: TrainingTelemetry
    pass_token_budget: int
    in_hand: WorkInHand = field(default_factory=WorkInHand)

    @property
    def base_model(self) -> str:
        """Served name of the base model."""
        return self.trainer.base.facts.name
