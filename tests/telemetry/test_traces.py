"""Spans reach the sink. Without a sink none are made."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from contracts.ids import RequestId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, OptimStep
from telemetry.telemetry import Telemetry
from telemetry.traces import Span, SpanIds, Traces, span_id_of
from tests.conftest import ROOT

TRACE = "0af7651916cd43dd8448eb211c80319c"
ID = "12345678-9abc-def0-1234-56789abcdef0"
NOW = datetime.now(UTC)


class Sink:
    """A sink that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        """Do nothing."""


def operation(trace_id: str | None) -> ReadyOperation:
    accepted = NOW - timedelta(seconds=4)
    kind = OperationKind.OPTIM_STEP
    return ReadyOperation(
        RequestId(ID), 1, TenantId("t"), "run", 1, kind, OptimStep(), 0, trace_id=trace_id, accepted_at=accepted
    )


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    program = (
        "import sys; from store.clock import utc_now; from store.settings import Settings;"
        "from telemetry.telemetry import open_telemetry;"
        "print(open_telemetry(Settings(), 'test', utc_now).traces.is_on,"
        "any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == ["False", "False"]


def test_a_wait_belongs_under_the_acceptance_and_a_step_links_to_it() -> None:
    sink = Sink()
    telemetry = Telemetry.of("test", lambda: NOW, Traces(sink))
    training = telemetry.training("org/name")
    training.claimed([operation(TRACE)])
    training.steps_done([operation(TRACE), operation(None)], seconds=0.5)
    wait, step = sink.spans
    accept = SpanIds(TRACE, span_id_of(ID))
    assert (wait.ids.trace_id, wait.parent, accept.span_id) == (TRACE, accept, "123456789abcdef0")
    assert wait.ended - wait.started >= 4
    assert step.links == [accept]
    assert step.ids.trace_id != TRACE
    assert step.ended - step.started == pytest.approx(0.5, abs=0.1)
    labels = {"kind": "optim_step", "base": "org/name"}
    assert telemetry.metrics.registry.get_sample_value("weft_queue_wait_seconds_sum", labels) == 4


def test_an_operation_without_a_trace_makes_no_span() -> None:
    sink = Sink()
    Telemetry.of("test", lambda: NOW, Traces(sink)).training("org/name").claimed([operation(None)])
    assert sink.spans == []
