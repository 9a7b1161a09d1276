"""What the ranks of a group send each other: typed records, tensors apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from contracts.operations import Datum, LoraSettings, LossSpec
from engine.model.base import BaseModel
from engine.model.lora import LoraLayout, LoraWeights
from engine.training.fused_micro_batch import MicroBatchResult
from engine.training.micro_batch import Member, PackedRow


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank 0 is there, and has no work."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The last message."""


@dataclass(frozen=True, slots=True)
class SentMember:
    """A member without its weights: those follow, float32 (size,)."""

    loss: LossSpec
    data: Mapping[int, Datum]
    settings: LoraSettings
    names: tuple[str, ...]
    size: int

    def member(self, base: BaseModel, vector: Tensor) -> Member:
        """The member, its adapter's weights being ``vector`` (size,)."""
        layout = LoraLayout(self.settings.rank, {name: base.projections[name] for name in self.names})
        return Member(self.loss, self.data, LoraWeights(self.settings, layout, vector))


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's micro-batches, one a round; in the rounds beyond, it only takes part in the gathers."""

    batches: list[list[PackedRow]]
    rounds: int
    backward: bool
    members: dict[int, SentMember]

    @classmethod
    def of(
        cls,
        members: Sequence[Member] | Mapping[int, Member],
        batches: list[list[PackedRow]],
        *,
        rounds: int,
        backward: bool,
    ) -> "Work":
        """The work on ``batches``, with what it needs of ``members``."""
        wanted: dict[int, dict[int, Datum]] = {}
        for batch in batches:
            for row in batch:
                wanted.setdefault(row.member, {})[row.datum] = members[row.member].data[row.datum]
        sent = {
            number: SentMember(
                loss=members[number].loss,
                data=data,
                settings=members[number].weights.settings,
                names=members[number].weights.layout.names,
                size=members[number].weights.vector.numel(),
            )
            for number, data in wanted.items()
        }
        return cls(batches, rounds, backward, sent)


@dataclass(frozen=True, slots=True)
class SentAttempt:
    """An attempt without its gradients: those of ``members`` follow, each float32 (layout.size,)."""

    attempt: MicroBatchResult
    members: list[int]

    @classmethod
    def of(cls, attempt: MicroBatchResult) -> "SentAttempt":
        """What is sent of ``attempt``."""
        if attempt.computed is None:
            return cls(attempt, [])
        return cls(replace(attempt, computed=replace(attempt.computed, gradients={})), list(attempt.computed.gradients))

    def with_gradients(self, gradients: dict[int, Tensor]) -> MicroBatchResult:
        """The attempt whole again."""
        if self.attempt.computed is None:
            return self.attempt
        return replace(self.attempt, computed=replace(self.attempt.computed, gradients=gradients))


Message = Beat | Stop | Work
