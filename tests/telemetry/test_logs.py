import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from contracts.ids import RequestId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, OptimStep
from telemetry.context import TraceParent, begin_work, current_work, note_caller, parse_traceparent, working_on
from telemetry.logs import MOST_FRAMES, configure_logging

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
log = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def the_tests_own_logging() -> Iterator[None]:
    """Restore the logging configuration after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def operation(trace_id: str | None = TRACE) -> ReadyOperation:
    return ReadyOperation(
        RequestId("o-1"), 1, TenantId("t-1"), "run", 1, OperationKind.OPTIM_STEP, OptimStep(), 0, trace_id=trace_id
    )


def test_a_json_line_has_the_ids_of_the_work_in_hand() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", "worker", stream)
    with working_on(operation()):
        log.info("hello %s", "world")
    log.info("alone \udcff")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "tests.logs",
        "message": "hello world",
        "process": "worker",
        "trace_id": TRACE,
        "tenant": "t-1",
        "operation": "o-1",
    }
    assert (second["message"], "trace_id" in second) == ("alone ?", False)


def test_a_json_line_holds_a_whole_traceback() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", "worker", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_function_that_calls_itself_leaves_a_short_traceback(log_format: Literal["text", "json"]) -> None:
    def down(levels: int) -> None:
        if not levels:
            raise ValueError("the bottom")
        # Two lines in turn: Python itself folds only one that is repeated.
        if levels % 2:
            down(levels - 1)
        else:
            down(levels - 1)

    stream = io.StringIO()
    configure_logging("info", log_format, "worker", stream)
    try:
        down(900)
    except ValueError:
        log.exception("it failed")
    told = stream.getvalue()
    assert told.count(", in down") == MOST_FRAMES
    assert "ValueError: the bottom" in told


def test_a_text_line_ends_with_the_ids() -> None:
    stream = io.StringIO()
    configure_logging("info", "text", "worker", stream)
    with working_on(operation(None)):
        log.info("hello")
    assert stream.getvalue().endswith(" INFO tests.logs hello tenant=t-1 operation=o-1\n")


async def test_work_is_noted_for_the_running_task_only() -> None:
    begin_work(TRACE, SPAN)
    note_caller("t-2", 1)
    assert (current_work().trace_id, current_work().span_id, current_work().tenant) == (TRACE, SPAN, "t-2")
    with working_on(operation()):
        assert current_work().tenant == "t-1"
    assert current_work().operation is None


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-00-later-versions-say-more", True),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-01x", False),
        (f"00-{TRACE}", False),
        ("", False),
        ("\r\nx-evil: 1", False),
    ],
)
def test_only_a_traceparent_as_the_standard_says_is_taken(header: str, is_valid: bool) -> None:
    assert parse_traceparent(header.encode()) == (TraceParent(TRACE, SPAN) if is_valid else None)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_line_has_a_password_or_a_whole_key(form: Literal["text", "json"]) -> None:
    key = "tml-0123456789ab-" + "s3cret_" * 6
    stream = io.StringIO()
    configure_logging("info", form, "worker", stream)
    try:
        raise ValueError("postgresql+asyncpg://weft:s3cret@db/weft")
    except ValueError:
        log.exception("at http://user:s3cret@gpu1:8000/v1 with %s", key)
    written = stream.getvalue()
    assert "s3cret" not in written
    assert all(shown in written for shown in ("gpu1:8000/v1", "@db/weft", "tml-0123456789ab"))
