"""Curves of runs for pages: read in pieces as buckets, and kept, since an ended step's point never changes."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from api.dashboard.curve_buckets import CurveBuckets, CurveColumns
from store.database import Database
from tenants.curves import (
    MOST_CURVE_POINTS,
    CurveRows,
    Series,
    broken_steps,
    curve_buckets,
    curve_points,
    last_step,
    rows_of_metric,
    rows_of_series,
    step_after,
)

MOST_CURVES = 64
"""Curves that a process keeps, those that were asked for last."""
MOST_RANGE = 2**17
"""Most steps of a part of a curve that is read anew. A longer part is cut out of the kept curve."""
PIECE = 2**13
"""Steps of a curve that one statement reads, which ends well within the time of a page's statement."""
FEW_POINTS = 256
"""Points that are read as any page's rows are. A longer curve is a survey, of which its tenant has one at a time."""


@dataclass(slots=True)
class _Kept:
    buckets: CurveBuckets = field(default_factory=CurveBuckets)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunCurves:
    """Reads curves of runs. The caller has checked that its tenant has the run."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: OrderedDict[tuple[str, Series], _Kept] = OrderedDict()

    async def series(self, run: str, series: Series) -> CurveColumns:
        """Return the curve of a series; only points that came since it was asked for last are read."""
        return (await self._whole(run, series)).columns()

    async def range_of(self, run: str, series: Series, begin: int, end: int) -> CurveColumns:
        """Return the part of a curve between two steps, both included, in narrower buckets than the whole curve's."""
        if end - begin >= MOST_RANGE:
            return (await self._whole(run, series)).columns(begin, end)
        buckets = CurveBuckets()
        await self._read(buckets, rows_of_series(run, series), begin - 1, end)
        return buckets.columns()

    async def metric(self, run: str, name: str, begin: int = 0, end: int | None = None) -> CurveColumns:
        """Return the curve of a user's own metric between two steps, read anew, since its values may change."""
        buckets = CurveBuckets()
        await self._read(buckets, rows_of_metric(run, name), begin - 1, end)
        return buckets.columns()

    async def _whole(self, run: str, series: Series) -> CurveBuckets:
        kept = self._kept.setdefault((run, series), _Kept())
        self._kept.move_to_end((run, series))
        while len(self._kept) > MOST_CURVES:
            self._kept.popitem(last=False)
        async with kept.lock:
            await self._read(kept.buckets, rows_of_series(run, series), max(kept.buckets.last_step, 0), None)
        return kept.buckets

    async def _read(self, buckets: CurveBuckets, rows: CurveRows, after: int, until: int | None) -> None:
        """Add the curve after a step: as points if they are few, as buckets of the database otherwise.

        Raises ``Unavailable`` where others of the tenant's surveys take too long.
        """
        async with self._database.read() as session:
            found = await curve_points(session, rows, after, until, most=FEW_POINTS)
        if len(found) < FEW_POINTS:
            buckets.add(found)
            return
        async with self._database.survey() as session:
            found = await curve_points(session, rows, after, until, most=MOST_CURVE_POINTS)
            last = None
            if len(found) == MOST_CURVE_POINTS:
                last = await last_step(session, rows, found[-1].step, until)
            if last is None:
                buckets.add(found)
                return
            buckets.make_room(found[0].step, last)
            while after < last:
                end = await step_after(session, rows, after, last, count=PIECE)
                made = await curve_buckets(session, rows, after, end, width=buckets.width)
                broken = []
                if any(one.broken for one in made) and buckets.broken_left:
                    broken = await broken_steps(session, rows, after, end, most=buckets.broken_left)
                buckets.add_buckets(made, broken=broken)
                after = end
