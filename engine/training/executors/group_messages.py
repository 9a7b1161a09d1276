"""Messages between the ranks of a trainer group: typed records, with the tensors sent apart from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from contracts.operations import Datum, LoraSettings, LossSpec
from engine.model.base import BaseModel
from engine.model.lora import LoraLayout, LoraWeights
from engine.training.fused_micro_batch import MicroBatchResult
from engine.training.micro_batch import Member, PackedRow


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign that rank 0 is alive but has no work."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Last message of a group that ends as planned."""


@dataclass(frozen=True, slots=True)
class SentMember:
    """A member without its weights. The weights follow as a tensor, float32 (size,)."""

    loss: LossSpec
    data: Mapping[int, Datum]
    settings: LoraSettings
    names: tuple[str, ...]
    size: int

    def member(self, base: BaseModel, vector: Tensor) -> Member:
        """Return the member with ``vector`` (size,) as its adapter's weights."""
        layout = LoraLayout(self.settings.rank, {name: base.projections[name] for name in self.names})
        return Member(self.loss, self.data, LoraWeights(self.settings, layout, vector))


@dataclass(frozen=True, slots=True)
class Work:
    """Micro-batches of one rank in a pass, one in each round.

    ``rounds`` is the same on every rank. A rank with fewer ``batches`` only takes part in the gathers of the last rounds.
    ``members`` are the members that ``batches`` need, by number.
    """

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
        """Return the work on ``batches``, with the members and sequences that they need."""
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
class SentResult:
    """A micro-batch's result without its gradients. The gradients of ``members`` follow, each float32 (layout.size,)."""

    result: MicroBatchResult
    members: list[int]

    @classmethod
    def of(cls, result: MicroBatchResult) -> "SentResult":
        """Return ``result`` without its gradients."""
        if result.output is None:
            return cls(result, [])
        return cls(replace(result, output=replace(result.output, gradients={})), list(result.output.gradients))

    def with_gradients(self, gradients: dict[int, Tensor]) -> MicroBatchResult:
        """Return the whole result, with ``gradients`` by member put back."""
        if self.result.output is None:
            return self.result
        return replace(self.result, output=replace(self.result.output, gradients=gradients))


Message = Heartbeat | Stop | Work
