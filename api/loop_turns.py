"""Middleware by which the requests of one sender take turns on the event loop (``api.loop_time``)."""

from collections.abc import Callable, Coroutine, Generator
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.connection_holder import HOLDER
from api.errors import error_response
from api.loop_time import START_SECONDS, LoopTime
from contracts.errors import TooManyRequests

MOST_WAITING = 1024
"""Most requests of one sender that wait for its turn."""
PATIENCE_SECONDS = 30.0
"""Longest wait of a request for its sender's turn; the SDK waits 60 s for an answer."""
_POLLS = ("/retrieve_future", "/retrieve_futures")
"""Ends of the paths that are never answered 429: SDKs up to 0.18 take it as the end of the result. Connections bound them."""


class LoopTurns:
    """ASGI middleware that has a sender's requests wait for each other when they take more than the sender's part."""

    def __init__(self, app: ASGIApp, *, loop_time: LoopTime) -> None:
        self._app = app
        self._time = loop_time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application in the sender's turn; answer 429 if too many of its requests wait, or this one for too long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, is_stranger = self._time.name_of(scope)
        if (connection := scope.get("extensions", {}).get(HOLDER)) is not None:
            connection["tell"](name)
        sender = self._time.enter(name, is_stranger=is_stranger)

        async def send_in_turn(message: Message) -> None:
            if message.get("more_body"):
                await self._time.turn(sender, 0.0)
            await send(message)

        try:
            try:
                if scope["path"].endswith(_POLLS):
                    await self._time.turn(sender, START_SECONDS)
                else:
                    await self._time.turn(sender, START_SECONDS, most_waiting=MOST_WAITING, patience=PATIENCE_SECONDS)
                work = self._run(scope, receive, send_in_turn)
            except TooManyRequests as refusal:
                self._time.charge(sender, START_SECONDS)
                work = _refuse(refusal, scope, receive, send)
            await _Measured(work, lambda used: self._time.charge(sender, used))
        finally:
            self._time.leave(sender)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Measured:
    """Awaitable that runs another one and reports how long each step between two waits held the loop, in seconds."""

    def __init__(self, work: Coroutine[Any, Any, None], charge: Callable[[float], None]) -> None:
        self._work = work
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            began = monotonic()
            try:
                awaited = [steps.send(value) if error is None else steps.throw(error)]
            except StopIteration:
                return
            finally:
                self._charge(monotonic() - began)
                # An error's traceback has this frame. If the frame kept the error, or the future that failed with it, all that
                # the request held, such as its body, would stay until the garbage collector looks at old objects.
                value, error = None, None
            try:
                value = yield awaited.pop()
            except BaseException as raised:  # noqa: BLE001 - handed on to the work, whose business it is
                error = raised


async def _refuse(refusal: TooManyRequests, scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_response(
        refusal.status,
        detail=refusal.message,
        code=refusal.code,
        retryable=refusal.retryable,
        retry_after=refusal.retry_after,
    )
    await answer(scope, receive, send)
