"""Rules on the logits that a token is drawn from, beyond temperature, top-k and top-p. Only vLLM servers follow them."""

from dataclasses import dataclass, field
from typing import Literal

MAX_PENALTY = 2.0
"""Largest penalty, and with the other sign the least."""
MAX_BIAS = 100.0
"""Largest bias of a token, and with the other sign the least."""
MOST_BIASES = 1024
"""Most tokens with a bias: vLLM's own limit on a GPU."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Form that a text must have: any JSON object, the JSON Schema ``text``, or xgrammar's structural tag ``text``."""

    kind: Literal["json_object", "json_schema", "structural_tag"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules of one sample.

    - ``frequency_penalty`` is taken off a token's logit for each time that the sequence has it, ``presence_penalty`` once.
      The prompt does not count.
    - ``biases``: tokens, and what is added to their logits.
    - ``grammar``: only tokens that go on in this form can be drawn.

    Reported logprobs do not show penalties and biases. They are of the tokens that the grammar allows.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    biases: list[tuple[int, float]] = field(default_factory=list)
    grammar: Grammar | None = None

    @property
    def look_back(self) -> bool:
        """True if a token's logit depends on the tokens drawn before it, and not through the model alone."""
        return bool(self.frequency_penalty or self.presence_penalty or self.grammar)
