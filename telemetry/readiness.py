"""Readiness of a process: named checks tell which of its parts can work. ``/readyz`` shows the verdict."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

log = logging.getLogger(__name__)

READY = "ok"
Check = Callable[[], Awaitable[None]]
"""Returns when a part can work. Raises ``NotReady`` with a public reason. Other exceptions are logged, not shown."""


class NotReady(Exception):
    """A part of the process cannot work. The message is public: without secrets or paths."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of all checks. ``parts`` maps each name to ``ok`` or to a reason. The process works without ``optional`` parts."""

    parts: dict[str, str]
    optional: frozenset[str] = frozenset()

    @property
    def is_ready(self) -> bool:
        """True when every required part can work."""
        return all(text == READY for name, text in self.parts.items() if name not in self.optional)

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return 200 if self.is_ready else 503

    def content(self) -> dict[str, object]:
        """Return the JSON body of the answer."""
        return {"ready": self.is_ready, "parts": self.parts}


@dataclass
class Readiness:
    """Named checks, run concurrently, each for at most ``seconds``.

    A verdict is reused for ``kept_seconds``, so that anonymous callers cannot put load on the database.
    """

    checks: dict[str, Check] = field(default_factory=dict)
    seconds: float = 2.0
    kept_seconds: float = 1.0
    _optional: set[str] = field(default_factory=set, init=False)
    _verdict: Verdict | None = field(default=None, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def add(self, name: str, check: Check, *, is_needed: bool = True) -> None:
        """Add a check, or replace the one of that name. A part that is not needed is shown, but does not count."""
        self.checks[name] = check
        (self._optional.discard if is_needed else self._optional.add)(name)

    def expect(self, name: str, reason: str) -> None:
        """Report the part as not ready, for ``reason``, until ``add`` replaces it."""
        self.add(name, partial(_not_yet, reason))

    async def look(self) -> Verdict:
        """Return the verdict, at most ``kept_seconds`` old. Concurrent callers share one run of the checks. Does not raise."""
        async with self._looking:
            if self._verdict is None or monotonic() - self._looked_at >= self.kept_seconds:
                asked = dict(self.checks)
                texts = await asyncio.gather(*(self._ask(name, check) for name, check in asked.items()))
                self._verdict = Verdict(dict(zip(asked, texts, strict=True)), frozenset(self._optional))
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
        except Exception as failure:  # noqa: BLE001 - an edge: a check that fails is a part that is not ready
            log.warning("readiness check %s failed: %s", name, failure)
            return f"failed ({type(failure).__name__})"
        return READY


async def _not_yet(reason: str) -> None:
    raise NotReady(reason)
