"""Owners pay for the tokens that are read and drawn for them, however and whenever their sequences end."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import EngineFailure
from contracts.turn_bounds import SAMPLE_QUANTUM
from engine.sampling.in_process import continuous_batching, prefill
from engine.sampling.in_process.batch import DecodeBatch
from engine.sampling.in_process.continuous_batching import ContinuousBatcher
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.prefill import Prefilled
from engine.sampling.in_process.sequences import Job
from engine.sampling.in_process.waiting_jobs import WaitingJobs
from engine.sampling.replica import GenerateRequest, NewToken
from tests.engine.sampling.conftest import World

CHUNK = 64
"""Tokens of a chunk of prompts."""
PROMPT = 3 * CHUNK
TOKENS = 50
SEQUENCES = 3


class Drawn:
    """Outbox of jobs that counts their tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, _stream: Any, event: Any) -> None:
        """Count a token."""
        self.tokens += isinstance(event, NewToken)

    def end(self, *_: Any) -> None: ...
    def answer(self, *_: Any) -> None: ...


def job_of(owner: str, outbox: Drawn, *, prompt: int = PROMPT, tokens: int = TOKENS, sequences: int = SEQUENCES) -> Job:
    """A greedy request's job."""
    ids = np.full(prompt, 7, np.int64)
    request = GenerateRequest(owner, ids, tuple(range(sequences)), tokens, temperature=0, owner=owner)
    return Job(request, outbox, lambda _: None)  # type: ignore[arg-type]


def cut(job: Job) -> None:
    """Cut every sequence."""
    job.cut(None, asyncio.get_running_loop().create_future())


def cut_one_by_one(job: Job) -> None:
    """Cut the sequences, the last one first."""
    for index in reversed(range(len(job.request.seeds))):
        job.cut(index, asyncio.get_running_loop().create_future())


def fail(job: Job) -> None:
    """Fail the job, as a step without memory does."""
    job.fail(EngineFailure("no memory"))


ENDS = pytest.mark.parametrize("end", [cut, cut_one_by_one, fail, Job.drop])


@ENDS
async def test_an_owner_whose_sequences_end_before_they_begin_waits_no_longer_than_another(
    end: Callable[[Job], None],
) -> None:
    """One seat is free at a time. The other owner's sequences have begun when they end. Both pay for prompts of one length."""
    waiting, served = WaitingJobs(1), Counter[str]()
    for _ in range(60):
        for owner in ("mine", "other"):
            waiting.add(job_of(owner, Drawn(), prompt=SAMPLE_QUANTUM, tokens=4 * SAMPLE_QUANTUM, sequences=1))
    for _ in range(60):
        (job,) = waiting.seat(Counter(third=1), lambda _: True)
        served[job.request.owner] += 1
        job.note_read(SAMPLE_QUANTUM)
        if job.request.owner == "other":
            job.begin()
        end(job)
    assert abs(served["mine"] - served["other"]) <= 4, served


class Accounts:
    """A batcher of short chunks, and what its owners are charged and given back."""

    def __init__(self, world: World) -> None:
        self.forward = ForwardPass(world.base)
        self.batcher = ContinuousBatcher(self.forward, 16, 1 << 30, piece_seconds=0.1)
        self.drawn: dict[str, Drawn] = {}
        self.unused = Counter[str]()

    def submit(self, owner: str) -> Job:
        """Queue a job of an owner."""
        self.drawn[owner] = Drawn()
        job = job_of(owner, self.drawn[owner])
        self.batcher.submit(job)
        credit = job.on_unused

        def noted(tokens: int) -> None:
            self.unused[owner] += tokens
            if credit is not None:
                credit(tokens)

        job.on_unused = noted
        return job

    def turn(self, number: int = 1) -> None:
        """Take turns."""
        with torch.inference_mode():
            for _ in range(number):
                self.batcher.turn()

    def finish(self) -> None:
        """Take turns until nothing is left."""
        while self.batcher.busy:
            self.turn()

    def paid(self, owner: str) -> int:
        """Tokens that an owner has paid, of a job whose sequences all got a seat."""
        return PROMPT + SEQUENCES * TOKENS - self.unused[owner]


@pytest.fixture
def accounts(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accounts]:
    for module in (prefill, continuous_batching):
        monkeypatch.setattr(module, "MAX_CELLS", CHUNK)
        monkeypatch.setattr(module, "CELLS_BESIDE_DECODING", CHUNK)
    made = Accounts(world)
    # The first prompt shows the size of a token: until then one sequence at a time has a seat.
    warm = job_of("warm", Drawn(), prompt=2, tokens=1, sequences=1)
    made.batcher.submit(warm)
    made.finish()
    yield made
    made.forward.close()


@ENDS
@pytest.mark.parametrize("chunks", [1, 2])
async def test_a_job_that_ends_while_its_prompt_is_read_pays_for_what_was_read(
    accounts: Accounts, end: Callable[[Job], None], chunks: int
) -> None:
    mine = accounts.submit("mine")
    accounts.turn(chunks)
    assert mine.seated == SEQUENCES
    end(mine)
    accounts.submit("other")
    accounts.finish()
    assert accounts.paid("mine") == chunks * CHUNK
    assert accounts.paid("other") == PROMPT + accounts.drawn["other"].tokens == PROMPT + SEQUENCES * TOKENS


@ENDS
async def test_a_job_that_ends_while_it_draws_pays_for_its_prompt_and_what_was_drawn(
    accounts: Accounts, end: Callable[[Job], None]
) -> None:
    mine = accounts.submit("mine")
    accounts.submit("other")
    while accounts.drawn["mine"].tokens < 4 * SEQUENCES:
        accounts.turn()
    drawn = accounts.drawn["mine"].tokens
    end(mine)
    accounts.finish()
    assert accounts.paid("mine") == PROMPT + drawn
    assert accounts.paid("other") == PROMPT + SEQUENCES * TOKENS


@pytest.mark.parametrize(
    ("where", "method", "read"),
    [(ForwardPass, "__call__", CHUNK), (Prefilled, "begin", PROMPT), (DecodeBatch, "step", PROMPT)],
)
def test_jobs_of_a_failed_step_pay_for_what_was_read_and_drawn(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch, where: type, method: str, read: int
) -> None:
    """A chunk that fails is paid as one that was read: it took the device's time."""
    accounts.submit("mine")
    whole = getattr(where, method)

    def lacking(*args: Any) -> Any:
        whole(*args)
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(where, method, lacking)
        accounts.finish()
    accounts.submit("other")
    accounts.finish()
    assert accounts.paid("mine") == read + accounts.drawn["mine"].tokens < PROMPT + SEQUENCES * TOKENS
    assert accounts.paid("other") == PROMPT + SEQUENCES * TOKENS
