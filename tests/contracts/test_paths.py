"""A path of another kind than a call takes is refused with the call that makes the right one."""

import re

import pytest
from tinker import ServiceClient, TrainingClient

from contracts.errors import InvalidRequest
from contracts.paths import Segment, parse_path

RUN = "tinker://run:train:0"


@pytest.mark.parametrize(
    ("wanted", "given", "way"),
    [
        (Segment.SAMPLER_WEIGHTS, "weights", "create_training_client_from_state, then call save_weights_for_sampler"),
        (Segment.SAMPLER_WEIGHTS, "external_weights", "as save_weights_for_sampler returns it"),
        (Segment.WEIGHTS, "sampler_weights", "as save_state returns it"),
        (Segment.WEIGHTS, "external_weights", "as save_state returns it"),
        (Segment.EXTERNAL_WEIGHTS, "weights", "as save_weights_external returns it"),
    ],
)
def test_a_path_of_another_kind_is_refused_with_the_call_that_makes_the_right_one(
    wanted: Segment, given: str, way: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_path(f"{RUN}/{given}/best", segment=wanted, field="model_path")
    assert refused.value.message.startswith(f"model_path must be a {wanted} path here, ")
    assert way in refused.value.message
    assert f"got one of {given}" in refused.value.message
    calls = re.findall(r"(?:save|create)_[a-z_]+", refused.value.message.partition("; got")[0].partition("here, ")[2])
    assert calls
    assert all(hasattr(TrainingClient, call) or hasattr(ServiceClient, call) for call in calls)
    assert parse_path(f"{RUN}/{wanted}/best", segment=wanted).segment is wanted
