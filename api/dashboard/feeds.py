"""Dependencies of the run pages: the feeds and the kept curves of this process."""

from typing import Annotated

from fastapi import Depends, FastAPI, Request

from api.dashboard.run_curves import RunCurves
from api.dashboard.run_feeds import RunFeeds
from api.services import ApiServices


def install_feeds(app: FastAPI, services: ApiServices) -> None:
    """Give the application its feeds and curves."""
    app.state.run_feeds = RunFeeds(services)
    app.state.run_curves = RunCurves(services.runtime.database)


async def get_feeds(request: Request) -> RunFeeds:
    """Return the process's feeds."""
    feeds: RunFeeds = request.app.state.run_feeds
    return feeds


async def get_curves(request: Request) -> RunCurves:
    """Return the process's curves."""
    curves: RunCurves = request.app.state.run_curves
    return curves


Feeds = Annotated[RunFeeds, Depends(get_feeds)]
Curves = Annotated[RunCurves, Depends(get_curves)]
