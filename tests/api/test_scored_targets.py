"""A prompt's targets are read off the event loop: a request of a few MiB may list hundreds of thousands of cells."""

import threading

import pytest

from api import sample_submission
from api.request_body import OFF_LOOP_BYTES
from api.wire.sampling_codec import sample_request
from tests.api.conftest import BASE, Tenant

PROMPT = 100


async def body(tenant: Tenant, *, columns: int) -> dict[str, object]:
    """A sample with ``columns`` sparse targets of the second token."""
    opened = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await tenant.http.post("/create_sampling_session", json=opened)).json()["sampling_session_id"]
    targets = {
        "data": [1] * columns,
        "dtype": "int64",
        "shape": [PROMPT - 1, columns],
        "sparse_crow_indices": [0] + [columns] * (PROMPT - 1),
        "sparse_col_indices": list(range(columns)),
    }
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [5] * PROMPT}]},
        "sampling_params": {"max_tokens": 5},
        "target_prompt_logprobs": targets,
    }


async def test_large_targets_are_converted_on_a_thread(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[bool] = []

    def convert(*args):
        on.append(threading.current_thread() is threading.main_thread())
        return sample_request(*args)

    monkeypatch.setattr(sample_submission, "sample_request", convert)
    large, small = await body(cats, columns=OFF_LOOP_BYTES), await body(dogs, columns=1)
    refused = await cats.http.post("/asample", json=large)
    assert (refused.status_code, "tokens at one position" in refused.text) == (400, True)
    assert (await dogs.http.post("/asample", json=small)).status_code == 200
    assert on == [False, True]
