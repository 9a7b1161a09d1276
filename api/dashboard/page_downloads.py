"""Downloads of pages, which end with their web session, its key or its tenant as streams of events do."""

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from api.dashboard.session_watch import SessionWatch
from api.endable_response import EndableResponse


class PageDownload(Response):
    """Sends ``response``, and breaks it off soon after a new request of the same web session would be refused."""

    def __init__(self, request: Request, response: Response) -> None:
        super().__init__(status_code=response.status_code, headers=dict(response.headers))
        self._request = request
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. The browser of one that breaks off sees an incomplete body, and keeps no whole file."""
        watch: SessionWatch = self._request.app.state.session_watch
        with watch.watch(self._request) as refused:
            await EndableResponse(self._response, refused.is_set)(scope, receive, send)
