"""The tokens of a followed sample in order: each once, none missing, whatever the feed loses or repeats."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contracts.operations import SampledSequence, SampleOutput
from contracts.sample_progress import SampleProgress
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from ledger.token_feed import TokensMade


class _Heard:
    """Tokens of one sequence, without a gap."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.changes: list[tuple[int, str | None]] = []

    def extend(self, part: TokensMade) -> None:
        """Append ``part``, after dropping the tokens from its start on."""
        del self.tokens[part.start :], self.logprobs[part.start :]
        self.changes = [change for change in self.changes if change[0] < part.start]
        if not self.changes or self.changes[-1][1] != part.version:
            self.changes.append((part.start, part.version))
        self.tokens += part.tokens
        self.logprobs += part.logprobs

    def spans(self) -> list[VersionSpan]:
        """Return the version spans."""
        ends = [*(start for start, _ in self.changes[1:]), len(self.tokens)]
        return [VersionSpan(version, start, end) for (start, version), end in zip(self.changes, ends, strict=False)]


class TokenOrder:
    """Record of what one follower has heard of a sample with ``count`` sequences."""

    def __init__(self, count: int) -> None:
        self._heard = [_Heard() for _ in range(count)]
        self._restarts = 0
        self._claim = 0
        self._publication: int | None = None
        self.gaps: dict[int, int] = {}
        """Sequences of which tokens before the last parts are missing, each with the number of tokens that were heard."""

    def take(self, made: Sequence[TokensMade]) -> list[TokensMade]:
        """Return what is new in ``made`` and follows what was heard without a gap.

        A part that starts before the end of what was heard replaces it: the sample began anew, or was drawn again. A part of
        an earlier claim is late: a process that stood still sends it after another one has gone on.
        """
        self.gaps = {}
        return [new for part in made if (new := self._take(part)) is not None]

    def _take(self, part: TokensMade) -> TokensMade | None:
        # A process of a version before tells no claim.
        claim = part.claim or self._claim
        if (claim, part.restarts) < (self._claim, self._restarts):
            return None
        self._claim = claim
        if part.restarts != self._restarts:
            self._restarts = part.restarts
            for heard in self._heard:
                # Kept as heard until the new tokens replace them; nothing of them counts any more.
                heard.tokens, heard.logprobs, heard.changes = [], [], []
            self._publication = None
        if part.publication is not None:
            self._publication = part.publication
        heard = self._heard[part.sequence]
        known = len(heard.tokens)
        if part.start > known:
            self.gaps[part.sequence] = known
            return None
        overlap = min(known - part.start, len(part.tokens))
        if heard.tokens[part.start : part.start + overlap] != part.tokens[:overlap]:
            heard.extend(part)
            return part
        if overlap == len(part.tokens):
            return None
        tokens, logprobs = part.tokens[overlap:], part.logprobs[overlap:]
        rest = replace(part, start=known, tokens=tokens, logprobs=logprobs)
        heard.extend(rest)
        return rest

    def progress(self) -> SampleProgress:
        """Return what was heard as a progress, from which a sampling process can go on."""
        sequences = [
            SampledSequence("length", np.array(one.tokens, np.int32), np.array(one.logprobs, np.float32), None)
            for one in self._heard
        ]
        reports = [SequenceReport("", one.spans()) for one in self._heard]
        report = SampleReport(reports, replicas=[], attempts=1, queue_seconds=0.0, decode_seconds=0.0)
        return SampleProgress(SampleOutput(sequences), report, self._publication, self._restarts)
