"""A sample across its attempts: the tokens that it has so far, and the requests that draw the rest.

Pure: no input or output and no clock. The caller sends the requests to a replica and passes the events back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from contracts.errors import EngineFailure
from contracts.operations import SampledSequence, SampleOutput, SampleRequest, TopkLogprobs, empty_topk
from contracts.prompt_cells import PromptCells
from contracts.sample_report import SequenceReport, VersionSpan
from engine.sampling.replica import (
    AdapterVersion,
    Ended,
    GenerateEvent,
    GenerateRequest,
    NewToken,
    PromptCached,
    PromptScored,
    PromptScoring,
)
from ledger.token_feed import TokensMade
from workers.sampling.stop_conditions import StopCheck, StopReason, StopRules

TOKENS_AT_A_TIME = 8
"""Tokens in one message of a replica where no reader needs each token at once: each message costs CPU time."""


@dataclass(slots=True)
class _Sequence:
    """Sequence of a sample with its tokens so far."""

    stop_check: StopCheck
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)
    changes: list[tuple[int, str | None]] = field(default_factory=list)
    """Index of the first token of each span, and the span's version. Neighbouring spans differ in version."""
    reason: StopReason | Literal["abort"] | None = None
    """Reason of the end, ``abort`` when the sample was aborted; None while the sequence has not ended."""
    published: int = 0
    """Tokens from the first one on that need not be published any more."""

    def append(self, event: NewToken, version: str | None) -> None:
        """Append the next token, drawn from ``version``."""
        if not self.changes or self.changes[-1][1] != version:
            self.changes.append((len(self.tokens), version))
        self.tokens.append(event.token)
        self.logprobs.append(event.logprob)
        if event.topk is not None:
            self.topk.append(event.topk)
        self.reason = self.stop_check.after(self.tokens)

    def spans(self) -> list[VersionSpan]:
        """Return the version spans; see ``Continuation.spans``."""
        ends = [*(start for start, _ in self.changes[1:]), len(self.tokens)]
        return [VersionSpan(version, start, end) for (start, version), end in zip(self.changes, ends, strict=False)]


class Continuation:
    """Sequences of one sample, drawn until each of them has ended."""

    def __init__(
        self,
        operation_id: str,
        sample: SampleRequest,
        stop: StopRules,
        *,
        cache_salt: str | None = None,
        owner: str = "",
        share: float = 1.0,
    ) -> None:
        """Draw ``sample`` with requests whose ids begin with ``operation_id``, until ``stop`` ends each sequence.

        Requests with different ``cache_salt`` share no prefix cache. ``owner`` and ``share``: see ``GenerateRequest``.
        """
        self._operation_id = operation_id
        self._sample = sample
        self._stop = stop
        self._cache_salt = cache_salt
        self._owner, self._share = owner, share
        self._scoring = _scoring(sample)
        self._scored: PromptScored | None = None
        self.scored_version: str | None = None
        """Version that scored the prompt, None for the bare base."""
        self._cached: int | None = None
        self._is_cache_counted = False
        """True if what comes later of the prompt's cache is of the sample's own making."""
        self._sequences = [_Sequence(StopCheck(stop)) for _ in range(sample.num_samples)]
        self._asked: dict[str, tuple[int, ...]] = {}
        self._undrawn: set[int] = set()
        """Sequences that the latest requests have not drawn a token of."""
        self.restarts = 0
        """Times that the sample was begun anew."""
        self.cache_clears = 0
        """Times that pauses have cleared what replicas have cached for the sample's gates."""

    @property
    def unfinished(self) -> int:
        """Number of sequences that have not ended."""
        return sum(sequence.reason is None for sequence in self._sequences)

    @property
    def finished(self) -> bool:
        """True once every sequence has ended."""
        return self.unfinished == 0

    @property
    def has_drawn(self) -> bool:
        """True once every sequence that the latest requests are to draw has a token of them."""
        return not self._undrawn

    @property
    def made(self) -> int:
        """Number of tokens of all sequences so far. It grows while the sample makes progress."""
        return sum(len(sequence.tokens) for sequence in self._sequences)

    @property
    def cached(self) -> int:
        """Number of the prompt's tokens that its first computation found in the replica's prefix cache."""
        return self._cached or 0

    @property
    def kept(self) -> int:
        """Number of tokens that the next attempt keeps: all of them, unless the sample is drawn in one piece."""
        in_pieces = not self._sample.in_one_piece
        return sum(len(sequence.tokens) for sequence in self._sequences if in_pieces or sequence.reason is not None)

    def requests(
        self, adapter: AdapterVersion | None, attempt: int, *, is_followed: bool = False
    ) -> list[GenerateRequest]:
        """Return the requests for the rest of the sample, as attempt number ``attempt``. Earlier requests become void.

        While there are no tokens, one request draws all sequences, so that the prompt is computed once. After that there
        is one request for each sequence that has not ended: for the rest of it, or for all of it if it must be drawn in one
        piece. The replica sends tokens one by one if the sample is followed (``is_followed``) or has stop strings, which
        only weft checks. Otherwise it sends ``TOKENS_AT_A_TIME``.
        """
        self._begin_pieces_again()
        if not self.made and self.scored_version != (adapter.name if adapter else None):
            # Every token will be of another version than the scores.
            self._scored = None
        name = f"{self._operation_id}.{attempt}"
        unfinished = [index for index, sequence in enumerate(self._sequences) if sequence.reason is None]
        self._asked = {f"{name}.{index}": (index,) for index in unfinished} if self.made else {name: tuple(unfinished)}
        self._undrawn = set(unfinished)
        each = 1 if is_followed or self._stop.strings else TOKENS_AT_A_TIME
        return [self._request(request_id, indices, adapter, each) for request_id, indices in self._asked.items()]

    def _request(
        self, request_id: str, indices: tuple[int, ...], adapter: AdapterVersion | None, tokens_at_a_time: int
    ) -> GenerateRequest:
        params = self._sample.params
        # Sequences that share a request have no tokens yet, so the first one stands for all.
        tokens = self._sequences[indices[0]].tokens
        return GenerateRequest(
            request_id=request_id,
            prompt=np.concatenate([self._sample.prompt, np.array(tokens, np.int64)]),
            seeds=tuple(segment_seed(params.seed, index, len(tokens)) for index in indices),
            max_tokens=self._stop.max_tokens - len(tokens),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop_tokens=self._stop.tokens,
            topk=self._sample.topk_sample_logprobs,
            scoring=self._scoring if self._scored is None else None,
            adapter=adapter,
            cache_salt=self._salt,
            owner=self._owner,
            share=self._share,
            tokens_at_a_time=tokens_at_a_time,
            logit_rules=self._sample.logit_rules,
        )

    @property
    def _salt(self) -> str | None:
        # vLLM refuses slashes.
        return f"{self._cache_salt or ''}:{self.cache_clears}" if self.cache_clears else self._cache_salt

    def take(self, request: GenerateRequest, event: GenerateEvent) -> int | None:
        """Take in the next event of ``request``, one of the latest ``requests``.

        Return the index, within the request, of a sequence that a stop string has just ended, else None. The replica
        knows no stop strings, so the caller must cut that sequence. Its further events are ignored.

        Raises ``EngineFailure`` for an event that cannot be right: a token without its logprob, an event out of order, or
        an end that was not asked for. The tokens so far stay valid.
        """
        if isinstance(event, PromptScored):
            self._take_scores(event)
            self.scored_version = request.adapter.name if request.adapter else None
            return None
        if isinstance(event, PromptCached):
            self._take_cached(request, event)
            return None
        index = self._asked[request.request_id][event.index]
        sequence = self._sequences[index]
        if sequence.reason is not None:
            return None
        if isinstance(event, Ended):
            if event.reason != "cut":
                raise EngineFailure(f"the replica ended a sequence ({event.reason}) that was to go on")
            return None
        self._check_token(event)
        sequence.append(event, request.adapter.name if request.adapter else None)
        self._undrawn.discard(index)
        by_text = sequence.reason == "stop" and event.token not in self._stop.tokens
        return event.index if by_text else None

    def new_tokens(self, most: int) -> list[TokensMade]:
        """Return at most ``most`` tokens that no earlier call has returned; first those of sequences that lack the fewest."""
        made: list[TokensMade] = []
        lacking = [(len(one.tokens) - one.published, index) for index, one in enumerate(self._sequences)]
        for lack, index in sorted(one for one in lacking if one[0] > 0):
            sequence, taken = self._sequences[index], min(lack, most)
            until, most = sequence.published + taken, most - taken
            for span in sequence.spans():
                start, end = max(span.start, sequence.published), min(span.end, until)
                if start < end:
                    part = slice(start, end)
                    tokens, logprobs = sequence.tokens[part], sequence.logprobs[part]
                    made.append(TokensMade(index, start, span.version, tokens, logprobs, self.restarts))
            sequence.published = until
        return made

    def publish_again(self, heard: Mapping[int, int]) -> None:
        """Have later ``new_tokens`` return each sequence in ``heard`` again, from so many tokens on."""
        for index, count in heard.items():
            if 0 <= index < len(self._sequences):
                sequence = self._sequences[index]
                sequence.published = min(sequence.published, max(count, 0))

    def has_ended(self, request: GenerateRequest) -> bool:
        """Return whether all sequences of ``request`` have ended."""
        return all(self._sequences[index].reason is not None for index in self._asked[request.request_id])

    def _check_token(self, event: NewToken) -> None:
        if self._scoring is not None and self._scored is None:
            raise EngineFailure("the replica sent a token before the scores of the prompt")
        if not math.isfinite(event.logprob):
            raise EngineFailure("the replica sent a token without its logprob")
        if event.topk is None and self._sample.topk_sample_logprobs > 0:
            raise EngineFailure("the replica sent a token without its likeliest alternatives")

    def _take_scores(self, event: PromptScored) -> None:
        if self._scoring is None or self._scored is not None:
            raise EngineFailure("the replica sent scores of the prompt that were not asked for")
        length = len(self._sample.prompt)
        if self._scoring.logprobs:
            logprobs = event.logprobs
            if logprobs is None or len(logprobs) != length or not np.isfinite(logprobs[self._scoring.start :]).all():
                raise EngineFailure("the replica left out logprobs of the prompt")
        if self._scoring.topk > 0 and (event.topk is None or len(event.topk.token_ids) != length):
            raise EngineFailure("the replica left out likeliest tokens of the prompt")

        if self._scoring.targets is not None:
            found = event.targets
            if found is None or len(found) != len(self._scoring.targets[0]) or not np.isfinite(found).all():
                raise EngineFailure("the replica left out logprobs of target tokens")
        wanted = (length - 1, self._scoring.alternatives)
        if self._scoring.alternatives and (event.alternatives is None or event.alternatives.tokens.shape != wanted):
            raise EngineFailure("the replica left out draws at the prompt's positions")
        self._scored = event

    def _take_cached(self, request: GenerateRequest, event: PromptCached) -> None:
        """Count the sample's own prompt, as its first computation found it: later ones find what the sample left."""
        if len(request.prompt) > len(self._sample.prompt) or self._is_cache_counted:
            return
        # Of several sequences the first to be computed has found the least.
        self._cached = event.tokens if self._cached is None else min(self._cached, event.tokens)
        self._is_cache_counted = self._scoring is not None and self._scored is None

    def restart(self) -> None:
        """Drop every token. Another version scores the prompt anew."""
        self.restarts += 1
        self._sequences = [_Sequence(StopCheck(self._stop)) for _ in range(self._sample.num_samples)]

    def _begin_pieces_again(self) -> None:
        """Drop the tokens of each unfinished sequence that is to be drawn in one piece."""
        if not self._sample.in_one_piece or not any(one.tokens and one.reason is None for one in self._sequences):
            return
        self.restarts += 1
        self._sequences = [one if one.reason else _Sequence(StopCheck(self._stop)) for one in self._sequences]
        # Readers drop every sequence of a sample that begins anew.
        self.publish_again(dict.fromkeys(range(len(self._sequences)), 0))

    def abandon(self) -> None:
        """End every sequence with the tokens that it has. Prompt scores that have not come stay missing."""
        for sequence in self._sequences:
            if sequence.reason is None:
                sequence.reason = "abort"

    def output(self) -> SampleOutput:
        """Return the sample's result. Raises ``EngineFailure`` while a sequence has not ended."""
        if not self.finished:
            raise EngineFailure("the sample is not finished")
        return self._output([self._sampled(sequence, sequence.reason or "length") for sequence in self._sequences])

    def _output(self, sequences: list[SampledSequence]) -> SampleOutput:
        return SampleOutput(
            sequences=sequences,
            prompt_logprobs=self._scored.logprobs if self._scored else None,
            topk_prompt_logprobs=self._scored.topk if self._scored else None,
            prompt_cache_hit_tokens=self.cached,
            target_prompt_logprobs=self._targets(),
            prompt_alt_tokens=self._scored.alternatives if self._scored else None,
        )

    def _targets(self) -> PromptCells | None:
        asked = self._sample.target_prompt_logprobs
        if asked is None or self._scored is None or self._scored.targets is None:
            return None
        return asked.scored(self._scored.targets)

    def so_far(self) -> SampleOutput:
        """Return the tokens so far. The stop reason of a sequence that has not ended means nothing."""
        return self._output([self._sampled(sequence, "length") for sequence in self._sequences])

    def resume(self, output: SampleOutput, reports: Sequence[SequenceReport], *, restarts: int) -> None:
        """Go on from what ``so_far`` and ``reports`` of an earlier continuation of this sample returned."""
        self.restarts = restarts
        self._sequences = [_resumed(self._stop, *one) for one in zip(output.sequences, reports, strict=True)]
        if self._scoring is not None and self.made:
            asked, scored = self._sample.target_prompt_logprobs, output.target_prompt_logprobs
            targets = None if asked is None or scored is None else asked.scores_of(scored)
            alternatives = output.prompt_alt_tokens
            self._scored = PromptScored(output.prompt_logprobs, output.topk_prompt_logprobs, targets, alternatives)
        if self.made:
            self._cached, self._is_cache_counted = output.prompt_cache_hit_tokens, True

    def spans(self) -> list[list[VersionSpan]]:
        """Return the version spans of each sequence so far: without gaps, neighbours of different versions."""
        return [sequence.spans() for sequence in self._sequences]

    def reports(self) -> list[SequenceReport]:
        """Return each sequence's stop reason and version spans. The reason is empty while the sequence has not ended."""
        return [SequenceReport(sequence.reason or "", sequence.spans()) for sequence in self._sequences]

    def _sampled(self, sequence: _Sequence, reason: StopReason | Literal["abort"]) -> SampledSequence:
        return SampledSequence(
            # Tinker's wire has no other stop reason for a sequence that could have gone on.
            stop_reason="length" if reason == "abort" else reason,
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            topk_logprobs=self._topk_table(sequence) if self._sample.topk_sample_logprobs > 0 else None,
        )

    def _topk_table(self, sequence: _Sequence) -> TopkLogprobs:
        table = empty_topk(len(sequence.tokens), self._sample.topk_sample_logprobs)
        for position, (ids, logprobs) in enumerate(sequence.topk):
            table.token_ids[position, : len(ids)] = ids
            table.logprobs[position, : len(ids)] = logprobs
        return table


def _resumed(stop: StopRules, sampled: SampledSequence, report: SequenceReport) -> _Sequence:
    """Return the sequence that ``sampled`` and ``report`` describe."""
    sequence = _Sequence(StopCheck(stop), sampled.tokens.tolist(), sampled.logprobs.tolist())
    sequence.changes = [(span.start, span.version) for span in report.spans]
    # The followers have these tokens; one that lacks some asks for them.
    sequence.published = len(sequence.tokens)
    if sampled.topk_logprobs is not None:
        sequence.topk = list(zip(sampled.topk_logprobs.token_ids, sampled.topk_logprobs.logprobs, strict=True))
    sequence.reason = sampled.stop_reason if report.stop_reason else sequence.stop_check.resume(sequence.tokens)
    return sequence


def segment_seed(seed: int | None, index: int, start: int) -> int | None:
    """Return the seed with which sequence ``index`` of a sample is drawn from its token ``start`` on.

    The first segment of the first sequence has the sample's own ``seed``. Every other segment has 63 bits of a hash
    of ``seed``, ``index`` and ``start``, so that no two segments share a random stream. None stays None.
    """
    if seed is None or (index == 0 and start == 0):
        return seed
    digest = blake2b(f"{seed}/{index}/{start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _scoring(sample: SampleRequest) -> PromptScoring | None:
    targets = None if sample.target_prompt_logprobs is None else sample.target_prompt_logprobs.wanted()
    scores_prompt = sample.prompt_logprobs or sample.topk_prompt_logprobs > 0
    if not scores_prompt and targets is None and not sample.prompt_alt_tokens_k:
        return None
    length = len(sample.prompt)
    last = length if sample.prompt_logprobs_last_n is None else sample.prompt_logprobs_last_n
    return PromptScoring(
        max(1, length - last),
        sample.prompt_logprobs,
        sample.topk_prompt_logprobs,
        targets,
        sample.prompt_alt_tokens_k,
    )
