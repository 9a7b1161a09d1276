"""Process of a trainer's forward: ``python -m workers.forward_server`` answers requests on standard input, one at a time.

It ends when standard input does, so it does not outlive the process that started it.
"""

import logging
import os
import sys
from pathlib import Path
from typing import BinaryIO

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.model.base import BaseModel
from engine.sampling.forward_messages import (
    LENGTH_BYTES,
    Answer,
    Load,
    Refused,
    Request,
    Score,
    Scored,
    WriteAdapters,
    Written,
    frame,
    read_request,
)
from workers.base_forward import BaseForward, Prompt

log = logging.getLogger(__name__)


def main() -> None:
    """Answer until standard input ends."""
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    forward: BaseForward | WeftError = EngineFailure("the base model is not loaded")
    while (request := _next(sys.stdin.buffer)) is not None:
        if isinstance(request, Load):
            forward = _loaded(request)
            continue
        try:
            answer = _answer(forward, request)
        except WeftError as error:
            answer = Refused(error.message, isinstance(error, InvalidRequest))
        except (RuntimeError, MemoryError, OSError):
            log.exception("a forward failed")
            answer = Refused("weft could not compute the scores, possibly for lack of memory", is_callers=False)
        answers.write(frame(answer))
        answers.flush()


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


def _next(requests: BinaryIO) -> Request | None:
    """Return the next request, or None at the end."""
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return read_request(requests.read(int.from_bytes(length, "big")))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
