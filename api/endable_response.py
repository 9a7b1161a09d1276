"""A response that breaks off between two pieces of its body once a condition holds, and lets others have their turn there."""

import asyncio
import logging
from collections.abc import Callable

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """Raised inside the response where it breaks off."""


class EndableResponse(Response):
    """Sends ``response``, and closes the connection before the next piece once ``is_ended`` returns true."""

    def __init__(self, response: Response, is_ended: Callable[[], bool]) -> None:
        super().__init__(status_code=response.status_code, headers=dict(response.headers))
        self._response = response
        self._is_ended = is_ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. The client of one that breaks off sees an incomplete body."""

        async def send_unless_ended(message: Message) -> None:
            if self._is_ended():
                raise BrokenOff
            await send(message)
            # Neither SQLite nor a socket that has room waits for anything: a long answer would hold the event loop to its end.
            await asyncio.sleep(0)

        try:
            await self._response(scope, receive, send_unless_ended)
        except* BrokenOff:
            log.info("an answer was broken off: its key or its web session has ended, or its tenant is blocked")
