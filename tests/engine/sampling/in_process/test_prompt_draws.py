"""Draws at a prompt's positions follow the seed alone, whoever else's prompt is read with it."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling.in_process import prefill
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.sequences import Job
from engine.sampling.replica import GenerateEvent, GenerateRequest, PromptScored, PromptScoring
from tests.engine.sampling.conftest import World

PROMPTS = {"mine": range(40, 72), "neighbour": range(100, 132)}
CHUNKS = 4
"""Chunks of two prompts that are scored together."""


class Scores:
    """Outbox of one job, which keeps the scores of its prompt."""

    scored: PromptScored

    def add(self, _stream: Any, event: GenerateEvent) -> None:
        """Keep the scores."""
        if isinstance(event, PromptScored):
            self.scored = event

    def end(self, *_: Any) -> None: ...


def drawn(forward: ForwardPass, *owners: str) -> dict[str, list[list[int]]]:
    """Return the draws at the positions of these owners' prompts, which are read together."""
    batcher, found = ContinuousBatcher(forward, 16, 1 << 30, piece_seconds=0.1), dict[str, Scores]()

    def submit(owner: str, prompt: list[int], scoring: PromptScoring | None) -> None:
        found[owner] = Scores()
        request = GenerateRequest(owner, np.array(prompt), (prompt[0],), 1, owner=owner, scoring=scoring)
        batcher.submit(Job(request, found[owner], lambda _: None))  # type: ignore[arg-type]

    with torch.inference_mode():
        # The first prompt shows the size of a token: until then one sequence at a time has a seat.
        submit("warm", [1, 2], None)
        while batcher.busy:
            batcher.turn()
        for owner in owners:
            submit(owner, list(PROMPTS[owner]), PromptScoring(start=1, logprobs=True, topk=0, alternatives=2))
        while batcher.busy:
            batcher.turn()
    tables = {owner: found[owner].scored.alternatives for owner in owners}
    return {owner: table.tokens.tolist() for owner, table in tables.items() if table is not None}


@pytest.mark.parametrize("failing", [None, *range(1, CHUNKS + 1)])
def test_seeded_draws_are_the_same_beside_a_neighbour_with_whom_a_chunk_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    """Each prompt is read again on its own then, from its beginning."""
    forward, whole, joint = ForwardPass(world.base), ForwardPass.__call__, list[int]()
    columns = len(PROMPTS["mine"]) // CHUNKS
    monkeypatch.setattr(prefill, "MAX_SCORED_LOGITS", 2 * columns * forward.vocabulary_size)
    alone = drawn(forward, "mine") | drawn(forward, "neighbour")

    def lacking(self: ForwardPass, token_ids: torch.Tensor, *rest: Any) -> Any:
        if len(token_ids) == 2 and token_ids.shape[1] > 1:
            joint.append(1)
            if len(joint) == failing:
                raise torch.OutOfMemoryError("no memory for two rows now")
        return whole(self, token_ids, *rest)

    monkeypatch.setattr(ForwardPass, "__call__", lacking)
    together = drawn(forward, "mine", "neighbour")
    forward.close()
    assert len(joint) == (failing or CHUNKS)
    assert together == alone
    assert alone["mine"] != alone["neighbour"]
