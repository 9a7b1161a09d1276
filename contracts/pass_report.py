"""Figures of one training pass over many adapters: the engine measures them, telemetry shows them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassReport:
    """Figures of a pass. Times are in seconds. ``tokens`` leaves padding out, ``padded_tokens`` includes it."""

    adapters: int
    sequences: int
    tokens: int
    padded_tokens: int
    seconds: float
    low_rank_seconds: float
    loss_seconds: float

    @property
    def padding_share(self) -> float:
        """Share of padding among all computed positions, 0 to 1."""
        return (self.padded_tokens - self.tokens) / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def base_seconds(self) -> float:
        """Seconds outside the low-rank part and the loss: the frozen base, and the pass around it."""
        return self.seconds - self.low_rank_seconds - self.loss_seconds


@dataclass(frozen=True, slots=True)
class EndedPass:
    """A pass that ended at ``at``, by the process's monotonic clock, and served ``tenants`` tenants."""

    report: PassReport
    tenants: int
    at: float
