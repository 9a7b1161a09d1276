"""Scores and training passes of one process take turns on an accelerator, so that the memory of one bounds the other's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import numpy as np
import pytest

from contracts.losses import LossName
from engine.model.base import BaseModel
from engine.model.device_turns import DeviceTurns
from engine.sampling.replica import PromptScoring
from engine.training.trainer import Trainer
from tests.engine.training.conftest import RUN, backward, make_batch, settings
from workers.base_forward import BaseForward, Prompt

DEADLINE = 60
MICRO_BATCHES = 4


class Watched:
    """Forwards that compute at a time, and whose they are. The first one lasts until ``may_end``."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.order: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def enter(self, *_: object) -> None:
        """Note that a forward begins."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(DEADLINE)

    def leave(self, *_: object) -> None:
        """Note that a forward ends."""
        with self._lock:
            self.now -= 1


@contextmanager
def watched(base: BaseModel) -> Iterator[Watched]:
    """Watch the forwards of the base's decoder."""
    found = Watched()
    hooks = [
        base.model.base_model.register_forward_pre_hook(found.enter),
        base.model.base_model.register_forward_hook(found.leave),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("topk", [0, 2])
def test_a_score_waits_for_one_micro_batch_of_a_pass_and_no_longer(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, topk: int
) -> None:
    """The device is told to have room for one computation: an accelerator's rule, on a CPU."""
    turns = DeviceTurns(one_at_a_time=True)
    monkeypatch.setattr(base, "turns", turns)
    trainer, forward = Trainer(base, pass_token_budget=16), BaseForward(base)
    # One after another, as an accelerator computes them.
    monkeypatch.setattr(trainer._executor, "_executor", None)
    trainer.create(RUN, settings())
    batch = make_batch(1, LossName.CROSS_ENTROPY, (16,) * MICRO_BATCHES)
    prompt = Prompt(None, np.arange(1, 9), PromptScoring(1, logprobs=True, topk=topk))
    scores = []
    with watched(base) as seen:
        training = threading.Thread(target=trainer.run_pass, args=([backward(RUN, batch)],), name="pass")
        training.start()
        assert seen.begun.wait(DEADLINE)
        scoring = threading.Thread(target=lambda: scores.append(forward.score_now(prompt)), name="score")
        scoring.start()
        until = monotonic() + DEADLINE
        while not turns.waiting and seen.now < 2 and monotonic() < until:
            sleep(0.001)
        seen.may_end.set()
        for thread in (training, scoring):
            thread.join(DEADLINE)
    assert seen.most == 1
    assert seen.order == ["pass", "score"] + ["pass"] * (MICRO_BATCHES - 1)
    (found,) = scores
    assert found.logprobs is not None
    assert np.isfinite(found.logprobs[1:]).all()


def test_turns_that_fail_are_given_on_and_a_cpu_has_none() -> None:
    turns = DeviceTurns(one_at_a_time=True)
    with pytest.raises(ValueError, match="broken"), turns.turn():
        raise ValueError("broken")
    with turns.turn():
        assert turns.waiting == 0
    free = DeviceTurns(one_at_a_time=False)
    with free.turn(), free.turn():
        assert free.waiting == 0
