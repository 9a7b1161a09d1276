"""Samples that are followed through an outage of the database."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from contracts.errors import Unavailable
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationStatus
from ledger.ledger import Ledger
from tests.api.conftest import Tenant
from tests.api.test_sample_submission import sampler

FAILURES = 3


async def test_an_outage_is_told_once_for_each_followed_sample(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("api.followed_sample._OUTAGE_SECONDS", 0.02)
    whole, asked, is_over = Ledger.wait_until_final, Counter[str](), asyncio.Event()

    async def failing(ledger: Ledger, tenant: TenantId, request: RequestId, **more: Any) -> OperationStatus:
        asked[request] += 1
        if asked[request] <= FAILURES:
            raise Unavailable("the database does not answer")
        if len(asked) == 2 and min(asked.values()) > FAILURES:
            is_over.set()
        return await whole(ledger, tenant, request, **more)

    monkeypatch.setattr(Ledger, "wait_until_final", failing)
    streams: list[AsyncIterator[str]] = []
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        stack.enter_context(caplog.at_level(logging.WARNING, "api.followed_sample"))
        for tenant in (cats, dogs):
            prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
            body = {"sampling_session_id": await sampler(tenant), "seq_id": 0, "prompt": prompt, "sampling_params": {}}
            answer = await stack.enter_async_context(tenant.http.stream("POST", "/stream_sample", json=body))
            # An iterator that is forgotten closes its stream.
            streams.append(answer.aiter_lines())
            assert await anext(streams[-1]) == "event: accepted"
        await is_over.wait()
    told = [record.getMessage() for record in caplog.records if "is followed on" in record.getMessage()]
    assert len(told) == len(asked) == 2
    assert all(sum(request in line for line in told) == 1 for request in asked)
