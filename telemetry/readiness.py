"""Whether a process is able to do its work, part by part."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

log = logging.getLogger(__name__)

READY = "ok"
Check = Callable[[], Awaitable[None]]
"""Returns when a part is able. Raises ``NotReady`` with text for anybody; any other exception is only named in the log."""


class NotReady(Exception):
    """Says what is wrong, in words without secrets or paths."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``parts`` is ``ok`` or what is wrong, by name; work goes on without those that are ``spared``."""

    parts: dict[str, str]
    spared: frozenset[str] = frozenset()

    @property
    def is_ready(self) -> bool:
        """Whether every part that is needed is able."""
        return all(text == READY for name, text in self.parts.items() if name not in self.spared)

    @property
    def status(self) -> int:
        """Of the HTTP answer."""
        return 200 if self.is_ready else 503

    def content(self) -> dict[str, object]:
        """Of the HTTP answer."""
        return {"ready": self.is_ready, "parts": self.parts}


@dataclass
class Readiness:
    """Named checks, run side by side, each for at most ``seconds``.

    An answer is given again for ``kept_seconds``: whoever asks, and anybody may, cannot make the database work.
    """

    checks: dict[str, Check] = field(default_factory=dict)
    seconds: float = 2.0
    kept_seconds: float = 1.0
    _spared: set[str] = field(default_factory=set, init=False)
    _verdict: Verdict | None = field(default=None, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def add(self, name: str, check: Check, *, is_needed: bool = True) -> None:
        """Ask this, too, or instead of what was expected by that name; a part that is not needed is only told of."""
        self.checks[name] = check
        (self._spared.discard if is_needed else self._spared.add)(name)

    def expect(self, name: str, reason: str) -> None:
        """Not able, for ``reason``, until a check is added by that name."""
        self.add(name, partial(_not_yet, reason))

    async def look(self) -> Verdict:
        """What is able now, or was a moment ago; many callers share one look. Does not raise."""
        async with self._looking:
            if self._verdict is None or monotonic() - self._looked_at >= self.kept_seconds:
                asked = dict(self.checks)
                texts = await asyncio.gather(*(self._ask(name, check) for name, check in asked.items()))
                self._verdict = Verdict(dict(zip(asked, texts, strict=True)), frozenset(self._spared))
                self._looked_at = monotonic()
            return self._verdict

    async def _ask(self, name: str, check: Check) -> str:
        try:
            async with asyncio.timeout(self.seconds):
                await check()
        except NotReady as reason:
            return str(reason)
        except TimeoutError:
            return f"no answer in {self.seconds:g} s"
        except Exception as failure:  # noqa: BLE001 - the edge: whatever fails is what is not ready
            log.warning("readiness check %s failed: %s", name, failure)
            return f"failed ({type(failure).__name__})"
        return READY


async def _not_yet(reason: str) -> None:
    raise NotReady(reason)
