"""Samples are checked before any replica hears of them, and get the base's own ends where they name none."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest, SamplingParams
from contracts.vocabulary import BaseVocabulary
from engine.sampling.vocabulary import read_vocabulary
from workers.sampling.sample_request import stop_rules

FACTS = BaseModelFacts("tiny", Path("tiny"), "any", context_length=100, vocabulary_size=320, tokenizer_id=None)
VOCABULARY = BaseVocabulary(frozenset({256}), lambda ids: bytes(ids).decode())


def sample(params: SamplingParams, prompt: list[int] | None = None, n: int = 1) -> SampleRequest:
    return SampleRequest(np.array([1, 2] if prompt is None else prompt, np.int64), n, params)


@pytest.mark.parametrize(
    ("params", "tokens", "strings"),
    [
        (SamplingParams(), {256}, ()),
        (SamplingParams(stop_tokens=[]), set(), ()),
        (SamplingParams(stop_tokens=[3, 4]), {3, 4}, ()),
        (SamplingParams(stop_strings=[]), set(), ()),
        (SamplingParams(stop_strings=["a", "b"]), set(), ("a", "b")),
    ],
)
def test_the_end_of_sequence_stops_unless_stops_are_given(
    params: SamplingParams, tokens: set[int], strings: tuple[str, ...]
) -> None:
    rules = stop_rules(sample(params), FACTS, VOCABULARY)
    assert (rules.tokens, rules.strings) == (tokens, strings)


def test_the_length_is_what_the_context_leaves_unless_given() -> None:
    assert stop_rules(sample(SamplingParams()), FACTS, VOCABULARY).max_tokens == 98
    # The last drawn token needs no place.
    assert stop_rules(sample(SamplingParams(max_tokens=99)), FACTS, VOCABULARY).max_tokens == 99
    assert stop_rules(sample(SamplingParams(), [1] * 100), FACTS, VOCABULARY).max_tokens == 1


BAD_SAMPLES = [
    (sample(SamplingParams(max_tokens=1), []), "prompt"),
    (sample(SamplingParams(max_tokens=1), [320]), "prompt"),
    (sample(SamplingParams(max_tokens=1), [-1]), "prompt"),
    (sample(SamplingParams(max_tokens=0)), "max_tokens"),
    (sample(SamplingParams(max_tokens=100)), "max_tokens"),
    (sample(SamplingParams(), [1] * 101), "context"),
    (sample(SamplingParams(temperature=-1)), "temperature"),
    (sample(SamplingParams(temperature=float("nan"))), "temperature"),
    (sample(SamplingParams(top_p=0)), "top_p"),
    (sample(SamplingParams(stop_strings=[""])), "stop"),
    (sample(SamplingParams(), n=0), "num_samples"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_SAMPLES)
def test_bad_samples_name_the_field(bad: SampleRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        stop_rules(bad, FACTS, VOCABULARY)


def test_stop_strings_need_a_tokenizer() -> None:
    bare = BaseVocabulary(frozenset({256}), None)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        stop_rules(sample(SamplingParams(stop_strings=["x"])), FACTS, bare)
    assert stop_rules(sample(SamplingParams(stop_tokens=[3])), FACTS, bare).decode is None


class TestVocabulary:
    """Read from the folder alone."""

    @pytest.fixture
    def folder(self, tiny_model_dir: Path, tmp_path: Path) -> Path:
        """A copy without the weights."""
        copy = tmp_path / "base"
        shutil.copytree(tiny_model_dir, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        return copy

    def test_text_and_ends(self, folder: Path) -> None:
        found = read_vocabulary(folder)
        assert found.decode is not None
        assert found.decode(list("naïve 猫".encode())) == "naïve 猫"
        assert found.end_of_sequence_ids == {json.loads((folder / "config.json").read_text())["eos_token_id"]}

    def test_the_generation_config_comes_first(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 319]}))
        assert read_vocabulary(folder).end_of_sequence_ids == {7, 319}
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
        assert read_vocabulary(folder).end_of_sequence_ids == {256}

    def test_ends_and_special_tokens_without_a_name_are_no_text(self, folder: Path) -> None:
        """Llama 3.1 and Gemma 3 have such ends of a turn."""
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        unnamed = {name: value for name, value in settings.items() if name != "extra_special_tokens"}
        file.write_text(json.dumps({**unnamed, "additional_special_tokens": []}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 319]}))
        assert read_vocabulary(folder).special_ids >= {256, 257, 258, 319}

    def test_no_tokenizer(self, folder: Path) -> None:
        for file in folder.glob("*token*"):
            file.unlink()
        assert read_vocabulary(folder).decode is None

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest):
            read_vocabulary(tmp_path / "nowhere")

    def test_the_context_length_is_the_bases(self, folder: Path) -> None:
        rules = stop_rules(
            sample(SamplingParams()), read_base_model_facts("tiny", folder, None), read_vocabulary(folder)
        )
        assert rules.max_tokens == 2046
