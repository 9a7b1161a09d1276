"""The figures of one fused pass, as the engine reports them and telemetry shows them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did. Times are seconds; ``base`` is all that is neither low-rank nor loss."""

    adapters: int
    sequences: int
    tokens: int
    padded_tokens: int
    seconds: float
    low_rank_seconds: float
    loss_seconds: float

    @property
    def padding_share(self) -> float:
        """Padded positions among all that were computed."""
        return (self.padded_tokens - self.tokens) / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def base_seconds(self) -> float:
        """Time of the frozen base, and of what holds the pass together."""
        return self.seconds - self.low_rank_seconds - self.loss_seconds
