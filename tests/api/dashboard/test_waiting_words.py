"""Words for the reasons of waiting: each has its own, and none is a name of the API's."""

from api.dashboard.waiting_words import waiting_words
from contracts.waiting import WaitReason


def test_every_reason_has_words_of_its_own() -> None:
    words = [waiting_words(reason.value) for reason in WaitReason]
    assert len(set(words)) == len(words)
    assert all("_" not in one and "seq id" not in one for one in words)
    assert waiting_words(None) == "–"
