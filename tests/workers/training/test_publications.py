"""Publications while a sampling process cannot read the version: the save waits, and offers the same version again."""

from pathlib import Path

import pytest

from contracts.errors import Unavailable
from contracts.ids import CheckpointId, RunId
from contracts.operations import OperationKind, OptimStep, OptimStepped, SaveWeightsForSampler
from ledger.publication import LocalPublication
from tests.workers.training.conftest import BASE, NewRig
from workers.training import checkpoint_operations

LIVE = SaveWeightsForSampler(None, sampling_session_seq_id=0, kind="inflight")


class Samplers:
    """Samplers that cannot read versions of the run ``unreadable``, so many times."""

    def __init__(self, times: int) -> None:
        self.unreadable, self._times = RunId(""), times
        self.asked: list[CheckpointId] = []

    async def prepare(self, run: RunId, version: CheckpointId) -> None:
        """Load a version."""
        if run == self.unreadable:
            self.asked.append(version)
            if len(self.asked) <= self._times:
                raise Unavailable("away")

    async def withdraw(self, version: CheckpointId) -> None:
        """Drop a version."""


@pytest.mark.parametrize("seconds", [30.0, -1.0])
async def test_a_version_that_cannot_be_read_for_a_while_leaves_its_save_pending(
    new_rig: NewRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The same version is offered again, and after its time another one is written. Another tenant trains on."""
    monkeypatch.setattr(checkpoint_operations, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(checkpoint_operations, "_PREPARE_SECONDS", seconds)
    rig, samplers = new_rig(), Samplers(times=2)
    publication = rig.runtime.publication
    assert isinstance(publication, LocalPublication)
    publication.register(BASE, samplers.prepare, samplers.withdraw)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        samplers.unreadable = client.run
        waiting = await client.send(LIVE, kind=OperationKind.SAVE_WEIGHTS_FOR_SAMPLER)
        assert isinstance(await other.do(OptimStep(learning_rate=1e-3)), OptimStepped)
        await client.result(waiting)
        assert len(samplers.asked) == 3
        assert len(set(samplers.asked)) == (1 if seconds > 0 else 3)
        versions = [folder.name for folder in (tmp_path / "checkpoints").iterdir()]
        assert versions == [samplers.asked[-1]], "a version that no row can name is removed"
