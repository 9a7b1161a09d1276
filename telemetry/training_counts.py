"""Sums of a trainer's work: passes, optimizer steps, adapters paged in and out."""

from dataclasses import dataclass, fields

from contracts.pass_report import PassReport


@dataclass(slots=True)
class TrainingCounts:
    """Sums since the trainer started. Times are seconds; ``tenants`` and ``adapters`` are summed over passes."""

    passes: int = 0
    tenants: int = 0
    adapters: int = 0
    sequences: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    base_seconds: float = 0.0
    low_rank_seconds: float = 0.0
    loss_seconds: float = 0.0
    optimizer_steps: int = 0
    optimizer_seconds: float = 0.0
    paged_out: int = 0
    paged_in: int = 0

    def add_pass(self, report: PassReport, *, tenants: int) -> None:
        """Add a pass that served ``tenants`` tenants."""
        self.passes += 1
        self.tenants += tenants
        self.adapters += report.adapters
        self.sequences += report.sequences
        self.tokens += report.tokens
        self.padded_tokens += report.padded_tokens
        self.base_seconds += report.base_seconds
        self.low_rank_seconds += report.low_rank_seconds
        self.loss_seconds += report.loss_seconds

    def add_steps(self, steps: int, *, seconds: float) -> None:
        """Add one fused optimizer step of ``steps`` adapters."""
        self.optimizer_steps += steps
        self.optimizer_seconds += seconds

    def since(self, earlier: "TrainingCounts") -> "TrainingCounts":
        """Return what was added after ``earlier``, a copy made before."""
        return TrainingCounts(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )

    @property
    def padding_share(self) -> float:
        """Padded positions among all that were computed."""
        return (self.padded_tokens - self.tokens) / self.padded_tokens if self.padded_tokens else 0.0

    def __str__(self) -> str:
        passes = max(self.passes, 1)
        return (
            f"passes={self.passes} tenants_per_pass={self.tenants / passes:.1f} "
            f"adapters_per_pass={self.adapters / passes:.1f} sequences={self.sequences} tokens={self.tokens} "
            f"padding={self.padding_share:.3f} base_s={self.base_seconds:.2f} low_rank_s={self.low_rank_seconds:.2f} "
            f"loss_s={self.loss_seconds:.2f} steps={self.optimizer_steps} optimizer_s={self.optimizer_seconds:.2f} "
            f"paged_in={self.paged_in} paged_out={self.paged_out}"
        )
