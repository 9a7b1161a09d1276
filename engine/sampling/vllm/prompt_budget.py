"""Limits how many prompt tokens a vLLM server has to prefill at a time, so that prompts do not delay running sequences.

Owners of prompts take turns by tokens (``engine.round_robin``). A turn of an owner of share 1 fills the budget. So many long
prompts of one owner do not stand before another owner, whose first turn is the next one.
"""

import asyncio
from dataclasses import dataclass

from engine.round_robin import Fairness, Verdict, take_turns


class Reservation:
    """Tokens that count against a ``PromptBudget`` until ``release``."""

    def __init__(self, budget: "PromptBudget", tokens: int) -> None:
        self._budget = budget
        self._tokens = tokens

    def release(self) -> None:
        """Return the tokens to the budget. Safe to repeat."""
        tokens, self._tokens = self._tokens, 0
        self._budget.add(tokens)


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt of ``cost`` tokens that waits for the budget."""

    cost: int
    share: float
    given: "asyncio.Future[None]"


class PromptBudget:
    """At most ``limit`` reserved tokens at a time (None: any number). Used from one event loop.

    A prompt longer than the limit is admitted when nothing else is reserved. The prompt whose turn it is waits until it
    fits, and all others behind it: short prompts would keep a long one out for ever.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._reserved = 0
        self._waiting: dict[str, dict[_Prompt, None]] = {}
        """Prompts that wait, oldest first, by owner."""
        self._fairness = Fairness()

    async def reserve(self, tokens: int, *, owner: str = "", share: float = 1.0) -> Reservation:
        """Wait for the turn of ``owner``, and until ``tokens`` fit into the budget, and reserve them."""
        if self._limit is None:
            return Reservation(self, 0)
        prompt = _Prompt(tokens, share, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, {})[prompt] = None
        self._hand_out()
        try:
            await prompt.given
        except asyncio.CancelledError:
            if prompt.given.cancelled():
                self._forget(owner, prompt)
                self._hand_out()
            else:
                self.add(tokens)
            raise
        return Reservation(self, tokens)

    def add(self, tokens: int) -> None:
        """Return ``tokens`` that were reserved."""
        self._reserved -= tokens
        self._hand_out()

    def _hand_out(self) -> None:
        """Reserve the tokens of the prompts whose turn has come, as far as they fit."""
        if not self._waiting or self._limit is None:
            return
        limit = self._limit
        given: list[tuple[str, _Prompt]] = []

        def offer(owner: str, prompt: _Prompt) -> Verdict:
            # A cancelled prompt is forgotten before the next turn.
            if prompt.given.done() or (self._reserved and self._reserved + prompt.cost > limit):
                return Verdict.FULL
            self._reserved += prompt.cost
            given.append((owner, prompt))
            return Verdict.TAKEN

        quanta = {owner: limit * next(iter(mine)).share for owner, mine in self._waiting.items()}
        self._fairness = take_turns(self._waiting, self._fairness, quanta=quanta, offer=offer)
        for owner, prompt in given:
            self._forget(owner, prompt)
            prompt.given.set_result(None)

    def _forget(self, owner: str, prompt: _Prompt) -> None:
        del self._waiting[owner][prompt]
        if not self._waiting[owner]:
            del self._waiting[owner]
