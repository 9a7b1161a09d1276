"""A line of usage as answers tell it, to its tenant and to operators."""

from dataclasses import asdict
from datetime import datetime
from typing import Self

from pydantic import BaseModel

from tenants.prices import cost_text
from tenants.usage_costs import PricedLine


class UsageInfo(BaseModel):
    """Usage of a bucket. What was not asked for, a sample's run and an unknown key are null.

    A prompt counts once for each request; ``cached_prompt_tokens`` of ``prompt_tokens`` came from a cache. ``cost`` is a
    decimal number, exactly what the tokens cost; null if some of them have no price.
    """

    start: datetime
    project: str | None
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    operations: int
    failed: int
    train_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int
    cost: str | None

    @classmethod
    def of(cls, priced: PricedLine) -> Self:
        """Return the line as it is told."""
        return cls(**asdict(priced.line), cost=cost_text(priced.cost))
