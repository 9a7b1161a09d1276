"""Page of a sample: bounded however many tokens were drawn, with the rest named, and no burden to others."""

import numpy as np
import pytest

from contracts.ids import RequestId
from contracts.operations import SampledSequence, SampleOutput
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from contracts.vocabulary import BaseVocabulary
from tenants.sample_reports import record_reports
from tests.api.conftest import BASE
from tests.api.dashboard.visits import visitor
from tests.api.test_joint_polls import finish, open_sampler, sample
from tests.api.test_request_bounds import answer_beside

MOST_BYTES = 4 * 2**20


@pytest.fixture
def with_text(service) -> None:
    """Have the base turn every token into a letter."""
    letters = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    service.services.vocabularies[BASE] = letters


async def drawn(tenant, lengths: list[int]) -> str:
    """Have a sample drawn whose sequences are as long as that."""
    request = await sample(tenant, await open_sampler(tenant), 0)
    report = SampleReport(
        [SequenceReport("length", [VersionSpan(None, 0, length)]) for length in lengths], ["one"], 1, 0.1, 1.0
    )
    sequences = [
        SampledSequence("length", np.full(length, 7, np.int32), np.full(length, -0.5, np.float32)) for length in lengths
    ]
    await finish(tenant.service, request, outcome=SampleOutput(sequences))
    async with tenant.service.database.write() as transaction:
        await record_reports(transaction, [(tenant.id, RequestId(request), report)])
    return request


async def test_a_page_of_many_long_sequences_is_bounded_and_holds_up_nobody(cats, dogs, with_text) -> None:
    place = f"/ui/samples/{await drawn(cats, [4096] * 64)}"
    async with visitor(cats.service, cats.key) as http:
        first = await answer_beside(dogs, http.get(place))
        last = await http.get(f"{place}?sequence=64")
        beyond = await http.get(f"{place}?sequence=65")
    for answer, number in ((first, 1), (last, 64)):
        assert answer.status_code == 200
        assert len(answer.content) < MOST_BYTES
        assert answer.text.count('class="tok ') == 4096
        assert f"This page shows sequence {number} of 64." in answer.text
        assert all(f'href="{place}?sequence={other}"' in answer.text for other in range(1, 65))
    assert beyond.status_code == 404


async def test_short_sequences_share_a_page_and_a_longer_one_tells_what_is_left_out(cats, with_text) -> None:
    place = f"/ui/samples/{await drawn(cats, [2000, 2000, 2000, 5000])}"
    async with visitor(cats.service, cats.key) as http:
        texts = [(await http.get(f"{place}?sequence={number}")).text for number in (1, 2, 3, 4)]
    assert [text.count('class="tok ') for text in texts] == [4000, 4000, 2000, 4096]
    assert "sequences 1 to 2 of 4" in texts[1]
    assert ["leaves out" in text for text in texts] == [False, False, False, True]
    assert "leaves out 904." in texts[3]
