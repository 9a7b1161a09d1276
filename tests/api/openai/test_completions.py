"""``/v1/completions`` over HTTP, with the test in place of the sampler."""

from typing import Any

import pytest
from sqlalchemy import func, select

from contracts.vocabulary import BaseVocabulary
from store.tables import Operation
from tests.api.conftest import BASE, Service, Tenant


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": BASE, "prompt": [1, 2], "max_tokens": 3, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_base_without_a_tokenizer_is_refused_before_it_samples(
    service: Service, cats: Tenant, stream: bool
) -> None:
    service.services.vocabularies[BASE] = BaseVocabulary(frozenset(), None)  # type: ignore[index]
    answer = await cats.http.post(f"{service.url}/v1/completions", json=asked(stream=stream), timeout=5)
    assert answer.status_code == 400
    assert "no tokenizer" in answer.json()["error"]["message"]
    async with service.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(Operation)) == 0
