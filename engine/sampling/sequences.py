"""A request being worked on, and the sequences (rows) it is sampled as."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.operations import SampledSequence, SampleOutput, SampleRequest, SamplingParams, TopkLogprobs
from engine.sampling.prompt_scores import NOT_FINITE, PromptScores, empty_topk
from engine.sampling.replica import GenerateRequest
from engine.sampling.stop_conditions import StopReason, StopRules, StopWatch
from engine.sampling.token_choice import uniform_stream
from engine.training.base import BaseModel
from engine.training.lora import LoraWeights


class Job:
    """One ``GenerateRequest`` from submission to its only outcome."""

    def __init__(self, request: GenerateRequest, stop: StopRules, on_settled: Callable[["Job"], None]) -> None:
        self.request = request
        self.stop = stop
        self.adapter: LoraWeights | None = None
        self.scores = PromptScores(request.sample) if PromptScores.wanted(request.sample) else None
        self.begun = 0
        """Samples that already decode or have ended."""
        self.outcome: Future[SampleOutput] = Future()
        # Running from the start: a cancelled waiter must not be able to cancel what the worker resolves.
        self.outcome.set_running_or_notify_cancel()
        self._on_settled = on_settled
        self._sequences: dict[int, SampledSequence] = {}
        self._settling = threading.Lock()
        self._settled = False

    @property
    def prompt_length(self) -> int:
        """P, in tokens."""
        return len(self.request.sample.prompt)

    @property
    def final_length(self) -> int:
        """Most tokens a sequence can come to, prompt included."""
        return self.prompt_length + self.stop.max_tokens

    @property
    def live(self) -> bool:
        """False once it has its outcome: whatever still runs for it can be dropped."""
        return not self._settled

    @property
    def ready(self) -> bool:
        """Whether its adapter, if any, is loaded."""
        return self.request.adapter is None or self.adapter is not None

    @property
    def order(self) -> tuple[str, str]:
        """Sort key that puts rows of one adapter version side by side."""
        adapter = self.request.adapter
        return ("", "") if adapter is None else (adapter.name, str(adapter.directory))

    def begin(self, count: int) -> list["Row"]:
        """The next ``count`` samples as new rows."""
        rows = [Row(self, index) for index in range(self.begun, self.begun + count)]
        self.begun += count
        return rows

    @property
    def unbegun(self) -> int:
        """Samples not yet begun."""
        return self.request.sample.num_samples - self.begun

    def add(self, index: int, sequence: SampledSequence) -> None:
        """Record sample ``index``; the last one resolves the job."""
        self._sequences[index] = sequence
        if len(self._sequences) < self.request.sample.num_samples:
            return
        output = SampleOutput(
            sequences=[self._sequences[i] for i in range(len(self._sequences))],
            prompt_logprobs=self.scores.logprobs if self.scores else None,
            topk_prompt_logprobs=self.scores.topk if self.scores else None,
        )
        if self._claim():
            self.outcome.set_result(output)

    def fail(self, error: WeftError) -> bool:
        """Settle with ``error``; False when already settled. Callable from any thread."""
        if not self._claim():
            return False
        self.outcome.set_exception(error)
        return True

    def _claim(self) -> bool:
        with self._settling:
            if self._settled:
                return False
            self._settled = True
        self._on_settled(self)
        return True


@dataclass(slots=True, eq=False)
class Row:
    """One sample while it decodes."""

    job: Job
    index: int
    uniforms: np.random.Generator = field(init=False)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    _stop: StopWatch = field(init=False)
    _logprobs: list[float] = field(default_factory=list)
    _topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uniforms = uniform_stream(self.job.request.sample.params.seed, self.index)
        self._stop = StopWatch(self.job.stop)

    @property
    def params(self) -> SamplingParams:
        return self.job.request.sample.params

    @property
    def topk(self) -> int:
        """How many likeliest tokens to report per position."""
        return self.job.request.sample.topk_sample_logprobs

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest, which the next forward takes in."""
        return self.job.prompt_length + len(self.tokens) - 1

    @property
    def runs(self) -> bool:
        """Whether it needs another forward."""
        return not self.ended and self.job.live

    def accept(self, token: int, logprob: float, topk: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Take the next token: its logprob, NaN or infinite when the logits were bad, and the top ids and logprobs."""
        if not -np.inf < logprob < np.inf:
            self.ended = True
            self.job.fail(EngineFailure(NOT_FINITE))
            return
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        reason = self._stop.after(self.tokens)
        if reason is not None:
            self.ended = True
            self.job.add(self.index, self._finish(reason))

    def _finish(self, reason: StopReason) -> SampledSequence:
        return SampledSequence(
            stop_reason=reason,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            topk_logprobs=self._topk_table() if self.topk > 0 else None,
        )

    def _topk_table(self) -> TopkLogprobs:
        table = empty_topk(len(self.tokens), self.topk)
        for position, (ids, logprobs) in enumerate(self._topk):
            table.token_ids[position, : len(ids)] = ids
            table.logprobs[position, : len(ids)] = logprobs
        return table


def stop_rules(sample: SampleRequest, base: BaseModel) -> StopRules:
    """Check ``sample`` against ``base`` and say when its sequences end.

    Raises ``InvalidRequest`` for a prompt that is empty, too long or has foreign tokens, for numbers out of range and
    for stop strings without a tokenizer.
    """
    _check(sample, base)
    params = sample.params
    strings = tuple(params.stop_strings or ())
    stops_by_default = params.stop_strings is None and params.stop_tokens is None
    tokens = base.end_of_sequence_ids if stops_by_default else frozenset(params.stop_tokens or ())
    room = base.facts.context_length - len(sample.prompt)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    return StopRules(max_tokens, tokens, strings, _decoder(base) if strings else None)


def _decoder(base: BaseModel) -> Callable[[list[int]], str]:
    tokenizer = base.tokenizer
    if tokenizer is None:
        raise InvalidRequest("stop: this base model has no tokenizer, so give stop token ids instead of text")

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def _check(sample: SampleRequest, base: BaseModel) -> None:
    params, facts, length = sample.params, base.facts, len(sample.prompt)
    if length == 0:
        raise InvalidRequest("prompt must have at least one token")
    if sample.prompt.min() < 0 or sample.prompt.max() >= facts.vocabulary_size:
        raise InvalidRequest(f"prompt: token ids must be from 0 to {facts.vocabulary_size - 1}")
    asked = 1 if params.max_tokens is None else params.max_tokens
    if asked < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    if length + asked > facts.context_length:
        raise InvalidRequest(
            f"prompt ({length} tokens) and max_tokens ({asked}) exceed the context of {facts.context_length} tokens"
        )
    if sample.num_samples < 1:
        raise InvalidRequest("num_samples must be at least 1")
    if not 0 <= params.temperature < np.inf:
        raise InvalidRequest("temperature must be a finite number of at least 0")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest("top_p must be over 0 and at most 1")
    if params.stop_strings and not all(params.stop_strings):
        raise InvalidRequest("stop: a stop string must not be empty")
