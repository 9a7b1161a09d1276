"""``weft serve`` with a trainer whose passes hang. Run as a module: ``hanging_service DATA BASE_SPEC``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from cli.process import run_process
from cli.serve import serve
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass, Trainer
from store.settings import Settings
from workers.training import trainer_wiring


class HangingTrainer(Trainer):
    """A trainer on a device that never answers."""

    def compute(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        """Hang."""
        Event().wait()
        return super().compute(pieces, slots=slots)


if __name__ == "__main__":
    data, spec = sys.argv[1:]
    trainer_wiring.Trainer = HangingTrainer  # type: ignore[misc]
    run_process(Settings(data_dir=Path(data), base_models=(spec,), port=0, stall_limit=1.0), "serve", serve)
