import pytest
from starlette.requests import Request

from api.wire.sdk_version import listed_segments
from contracts.paths import Segment


@pytest.mark.parametrize(
    ("told", "takes_external"),
    [
        ("0.18.2", False),
        ("0.27.9", False),
        ("0.28.0", True),
        ("0.38.0", True),
        ("1.0", True),
        ("odd", True),
        (None, True),
    ],
)
def test_external_checkpoints_are_hidden_from_sdks_that_cannot_parse_them(
    told: str | None, takes_external: bool
) -> None:
    headers = [] if told is None else [(b"x-stainless-package-version", told.encode())]
    segments = listed_segments(Request({"type": "http", "headers": headers}))
    assert (Segment.EXTERNAL_WEIGHTS in segments) is takes_external
    assert {Segment.WEIGHTS, Segment.SAMPLER_WEIGHTS} <= segments
