"""The attacker: one process with one valid key that makes each attack in its turn, and then all at once.

The process runs with the least priority: on a machine that it shares with the service, its own work must not look like the
service's slowness. Every attack uses tens of connections, so all together use some hundreds.
"""

import asyncio
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import aiohttp
import uvloop

from bench.hostile.attacks import ATTACKS
from bench.hostile.foothold import Foothold
from bench.processes.json_process import give_answer, given_task

NICENESS = 19
_COUNTED_SECONDS = 0.5
"""Seconds after a strike's end in which its traces stay, so that they can be counted."""
_CLEANING_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Strike:
    """Attacks from ``begin`` to ``end``, in seconds of ``time.monotonic``."""

    name: str
    attacks: list[str]
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class AttackTask:
    """Task: make every strike at its time."""

    base_url: str
    key: str
    base_model: str
    strikes: list[Strike]

    @classmethod
    def given(cls) -> "AttackTask":
        """Read the task of this process."""
        found = given_task()
        strikes = [Strike(**one) for one in found.pop("strikes")]
        return cls(**found, strikes=strikes)


@dataclass(slots=True)
class Tally:
    """Answers of one strike by status, 0 for connections that broke, and the processor seconds that the attacker took."""

    answers: dict[int, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    unforeseen: list[str] = field(default_factory=list)


async def attack(task: AttackTask) -> dict[str, Tally]:
    """Make every strike and return its tally by its name."""
    found: dict[str, Tally] = {}
    for strike in task.strikes:
        await asyncio.sleep(max(0.0, strike.begin - time.monotonic()))
        found[strike.name] = await _strike(task, strike)
    return found


async def _strike(task: AttackTask, strike: Strike) -> Tally:
    tally, answers, cpu = Tally(), Counter[int](), time.process_time()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        footholds = [Foothold(task.base_url, task.key, task.base_model, http, answers) for _ in strike.attacks]

        async def make(name: str, foothold: Foothold) -> None:
            try:
                await foothold.open()
                await ATTACKS[name](foothold)
            except* (RuntimeError, OSError, KeyError) as errors:
                tally.unforeseen += [f"{name}: {error!r}"[:300] for error in errors.exceptions]

        attacks = [asyncio.create_task(make(*one)) for one in zip(strike.attacks, footholds, strict=True)]
        await asyncio.sleep(max(0.0, strike.end - time.monotonic()))
        for one in attacks:
            one.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
        tally.answers, tally.cpu_s = dict(answers), time.process_time() - cpu
        await asyncio.sleep(max(0.0, strike.end + _COUNTED_SECONDS - time.monotonic()))
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEANING_SECONDS):
                await asyncio.gather(*(foothold.close() for foothold in footholds))
    return tally


def main() -> None:
    """Read the task, attack, and write the tallies."""
    os.nice(NICENESS)
    found = uvloop.run(attack(AttackTask.given()))
    give_answer({name: asdict(tally) for name, tally in found.items()})


if __name__ == "__main__":
    main()
