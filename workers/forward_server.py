"""Process of a trainer's forward: ``python -m workers.forward_server`` answers requests, one at a time."""

import logging
from pathlib import Path
from typing import NoReturn

from contracts.errors import EngineFailure, WeftError
from engine.model.base import BaseModel
from engine.sampling.forward_messages import (
    Answer,
    Load,
    Refused,
    Score,
    Scored,
    WriteAdapters,
    Written,
    message_bytes,
    read_request,
)
from workers.base_forward import BaseForward, Prompt
from workers.child_process import Requests

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Answer until standard input ends."""
    requests = Requests()
    forward: BaseForward | WeftError = EngineFailure("the base model is not loaded")
    while True:
        request = read_request(requests.next())
        if isinstance(request, Load):
            forward = _loaded(request)
            continue
        try:
            answer = _answer(forward, request)
        except WeftError as error:
            answer = Refused.of(error)
        except (RuntimeError, MemoryError, OSError):
            log.exception("a forward failed")
            answer = Refused("weft could not compute the scores, possibly for lack of memory", is_callers=False)
        requests.answer(message_bytes(answer))


def _loaded(request: Load) -> BaseForward | WeftError:
    """Return the base's forward, or the error that answers every request for it."""
    try:
        return BaseForward(BaseModel.load(request.facts, dtype=request.dtype, device="cpu"))
    except WeftError as error:
        return error


def _answer(forward: BaseForward | WeftError, request: Score | WriteAdapters) -> Answer:
    if isinstance(forward, WeftError):
        raise forward
    if isinstance(request, Score):
        prompt, scoring = request.asked()
        return Scored.of(forward.score_now(Prompt(request.adapter, prompt, scoring, request.draws)))
    return Written(forward.adapters_now(Path(request.folder), request.rank, with_head=request.with_head))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
