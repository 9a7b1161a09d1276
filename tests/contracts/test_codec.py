"""Rows that other versions have recorded are read as what they mean."""

import msgspec
import numpy as np

from contracts.codec import decode_payload, encode
from contracts.logit_rules import Grammar, LogitRules
from contracts.operations import OperationKind, SampleRequest

PROMPT = np.array([5, 6, 7], np.int64)


def test_a_sample_that_an_older_version_has_recorded_has_no_logit_rules() -> None:
    fields = msgspec.msgpack.decode(encode(SampleRequest(PROMPT)), type=dict[str, msgspec.Raw])
    assert fields.pop("logit_rules")
    found = decode_payload(OperationKind.SAMPLE, msgspec.msgpack.encode(fields))
    assert isinstance(found, SampleRequest)
    assert found.logit_rules is None
    assert found.prompt.tolist() == PROMPT.tolist()


def test_logit_rules_are_read_as_they_were_recorded() -> None:
    rules = LogitRules(0.5, -1.0, [(3, 1.5), (9, -100.0)], Grammar("json_schema", '{"type":"object"}'))
    found = decode_payload(OperationKind.SAMPLE, encode(SampleRequest(PROMPT, logit_rules=rules)))
    assert isinstance(found, SampleRequest)
    assert found.logit_rules == rules
