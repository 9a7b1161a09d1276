"""Figures of ``bench.swap``, computed from the arrival times of streamed tokens."""

import statistics
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.swap.tenant import Round, Swap, SwapTenant

Figures = dict[str, float]
_AFTER_SECONDS = 0.05
"""Seconds after the first new token in which a gap still counts as the swap's."""


class WithGaps(Protocol):
    """A stream that knows its gaps, (begin, end) between arrivals of a sample's tokens."""

    @property
    def gaps(self) -> list[tuple[float, float]]: ...


class Gaps:
    """All gaps between tokens of a tenant's streams, in the order of their ends."""

    def __init__(self, streams: Sequence[WithGaps]) -> None:
        pairs = sorted((end, begin) for stream in streams for begin, end in stream.gaps)
        table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        self._ends: NDArray[np.float64] = table[:, 0]
        self._begins: NDArray[np.float64] = table[:, 1]

    def within(self, begin: float, end: float) -> NDArray[np.float64]:
        """Return the seconds of the gaps that lie between ``begin`` and ``end``."""
        chosen = (self._begins >= begin) & (self._ends <= end)
        return self._ends[chosen] - self._begins[chosen]

    def largest(self, begin: float, end: float) -> float:
        """Return the seconds of the largest gap that touches the window; 0 without a gap."""
        chosen = (self._begins <= end) & (self._ends >= begin)
        return float((self._ends[chosen] - self._begins[chosen]).max(initial=0.0))


def window(swap: Swap) -> tuple[float, float]:
    """Return the time, (begin, end), in which a swap may delay tokens."""
    return swap.asked, swap.first + _AFTER_SECONDS


def control_windows(turn: Round) -> list[tuple[float, float]]:
    """Return windows in the round's quiet time, each as long as one of the round's swaps."""
    length = statistics.median(end - begin for begin, end in map(window, turn.swaps))
    begin, end = turn.quiet
    return [(begin + number * length, begin + (number + 1) * length) for number in range(int((end - begin) / length))]


def neighbour_figures(gaps: Gaps, rounds: Sequence[Round]) -> Figures:
    """Return figures of the largest gaps in windows with and without swaps, over the same round's p99 without swaps."""
    p50s, p99s, largest, ratios, control_ratios = [], [], [], [], []
    for turn in rounds:
        if not turn.swaps:
            continue
        quiet = gaps.within(*turn.quiet)
        p99 = float(np.percentile(quiet, 99))
        p50s.append(float(np.median(quiet)))
        p99s.append(p99)
        found = [gaps.largest(*window(swap)) for swap in turn.swaps]
        largest += found
        ratios += [gap / p99 for gap in found]
        control_ratios += [gaps.largest(*place) / p99 for place in control_windows(turn)]
    return {
        "neighbour_gap_ratio": statistics.median(ratios),
        "neighbour_gap_ratio_without_swaps": statistics.median(control_ratios) if control_ratios else 0.0,
        "neighbour_gap_p50_ms": statistics.median(largest) * 1e3,
        "neighbour_gap_worst_ms": max(largest) * 1e3,
        "quiet_p50_ms": statistics.median(p50s) * 1e3,
        "quiet_p99_ms": statistics.median(p99s) * 1e3,
    }


def swap_figures(swapped: SwapTenant, neighbour: SwapTenant, rounds: Sequence[Round]) -> Figures:
    """Return the figures that need no look at the weights."""
    swaps = [swap for turn in rounds for swap in turn.swaps]
    firsts = np.array([swap.first - swap.asked for swap in swaps]) * 1e3
    samples = swapped.samples + neighbour.samples
    reports = [sample.report for sample in swapped.samples if sample.report is not None]
    cuts = sum(report["attempts"] - 1 for report in reports)
    again = sum(len(sample.prompt) + start for sample in swapped.samples for _, start, _ in sample.spans[1:])
    return {
        "swap_p50_ms": float(np.percentile(firsts, 50)),
        "swap_p95_ms": float(np.percentile(firsts, 95)),
        "swap_worst_ms": float(firsts.max()),
        "swap_answered_p50_ms": statistics.median(swap.answered - swap.asked for swap in swaps) * 1e3,
        "swap_all_streams_p50_ms": statistics.median(swap.all_shown - swap.asked for swap in swaps) * 1e3,
        **neighbour_figures(Gaps(neighbour.streams), rounds),
        "recomputed_tokens_per_cut": again / max(1, cuts),
        "cuts": cuts,
        "swaps": len(swaps),
        "streams": len(swapped.streams) + len(neighbour.streams),
        "samples": len(samples),
        "lost": sum(not sample.is_whole for sample in samples),
    }


def bare_figures(streams: Sequence[WithGaps], rounds: Sequence[Round]) -> Figures:
    """Return the figures of swaps made at vLLM directly. ``streams`` are the neighbour's."""
    swaps = [swap for turn in rounds for swap in turn.swaps]
    firsts = np.array([swap.first - swap.asked for swap in swaps]) * 1e3
    found = {
        "swap_p50_ms": float(np.percentile(firsts, 50)),
        "swap_p95_ms": float(np.percentile(firsts, 95)),
        "swap_loaded_p50_ms": statistics.median(swap.answered - swap.asked for swap in swaps) * 1e3,
        **neighbour_figures(Gaps(streams), rounds),
    }
    return {f"bare_{name}": value for name, value in found.items()}
