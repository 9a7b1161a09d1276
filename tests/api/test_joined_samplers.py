"""Copies of a sampling client, each with a number of its own."""

from tinker.types.join_sampling_session_response import JoinSamplingSessionResponse


async def open_sampler(tenant) -> str:
    session = (await tenant.http.post("/create_session", json={"sdk_version": "0.38.0"})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "test/tiny"}
    sampler: str = (await tenant.http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
    return sampler


async def join(tenant, sampler: str):
    body = {"sampling_session_id": sampler, "type": "join_sampling_session"}
    return await tenant.http.post("/join_sampling_session", json=body)


async def test_each_copy_of_a_sampler_has_a_number_of_its_own(cats, dogs) -> None:
    mine, other = await open_sampler(cats), await open_sampler(dogs)
    numbers = [
        JoinSamplingSessionResponse.model_validate((await join(cats, mine)).json()).client_counter for _ in range(3)
    ]
    assert numbers == [1, 2, 3]
    assert (await join(dogs, other)).json()["client_counter"] == 1
    assert (await join(dogs, mine)).status_code == 404


async def test_a_sampler_of_an_ended_session_is_not_joined(cats, dogs) -> None:
    mine, other = await open_sampler(cats), await open_sampler(dogs)
    session = mine.partition(":")[0]
    (await cats.http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})).raise_for_status()
    refused = await join(cats, mine)
    assert (refused.status_code, refused.json()["code"]) == (400, "session_ended")
    assert (await join(dogs, other)).status_code == 200
