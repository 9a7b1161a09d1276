"""The sampler's part in OpenAI requests, played by the test."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from contracts.ledger_records import Completion
from contracts.operations import SampledSequence, SampleOutput
from ledger.token_feed import TokensMade
from store.repeat import wait_for
from tests.api.conftest import BASE, Tenant
from tests.ledger_heads import pending_samples


async def answered(
    tenant: Tenant,
    body: dict[str, Any],
    *sequences: Sequence[int],
    parts: Sequence[TokensMade] = (),
    stop_reason: str = "length",
    path: str = "/v1/completions",
    **headers: str,
) -> httpx.Response:
    """The answer to a request for which a sampler publishes the parts, and then draws the sequences."""
    service = tenant.service
    runtime = service.services.runtime
    asking = asyncio.create_task(tenant.http.post(service.url + path, json=body, headers=headers, timeout=30))
    async with asyncio.timeout(30):
        while not asking.done():
            async with service.database.read() as session:
                ready = await pending_samples(service.ledger, session, BASE, service.clock())
            if ready:
                break
            await wait_for(asyncio.Event(), 0.02)
        for part in parts:
            (key,) = runtime.feed.followed_here()
            runtime.feed.publish(key, [part])
        drawn = [
            SampledSequence(stop_reason, np.array(tokens, np.int32), -np.ones(len(tokens), np.float32))
            for tokens in sequences
        ]
        async with service.database.write() as transaction:
            await service.ledger.complete(transaction, [Completion(one, SampleOutput(drawn)) for one in ready])
        return await asking
