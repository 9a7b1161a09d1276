"""A tenant whose adapter says a word, so that a reader sees which version made a token."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, lesson_message
from tests.e2e.sample_stream import DEADLINE_SECONDS, SampleStream

T = TypeVar("T")

TRIES = 10
PROMPT = [ord(letter) for letter in "Say: "]
TAUGHT = 160
LONG = 190
"""Tokens of a sample: long enough to be cut on a busy machine, longer than what was taught."""
MEOW, WOOF = "meow ", "woof "
BARK, LOWS = "bark ", "lows "
"""Like ``MEOW`` words without a letter twice: 20 steps teach one, whatever was said before. Of ``WOOF`` 150 do."""


@dataclass
class Speaker:
    """A tenant whose live sampler says a word. ``paths`` are its checkpoints by the word they say."""

    client: RawClient
    run: str
    sampler: str
    paths: dict[str, str]
    asked: int = 0
    said: dict[str, list[int]] = field(default_factory=dict)

    def stream(self, *, n: int = 1, tokens: int = LONG, sampler: str | None = None) -> SampleStream:
        """A greedy sample, streamed."""
        body = self.body(n=n, tokens=tokens, sampler=sampler)
        return SampleStream(self.client.base_url, self.client.key, body).start()

    def send(self, *, tokens: int = LONG, sampler: str | None = None) -> str:
        """A greedy sample, accepted and not waited for; its request id."""
        answer = self.client.post("/asample", **self.body(tokens=tokens, sampler=sampler))
        assert answer.status_code == 200, answer.text
        request_id: str = answer.json()["request_id"]
        return request_id

    def body(self, *, n: int = 1, tokens: int = LONG, sampler: str | None = None) -> dict[str, Any]:
        """The request for a greedy sample, never asked for before."""
        self.asked += 1
        return {
            "sampling_session_id": sampler or self.sampler,
            "seq_id": self.asked,
            "num_samples": n,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": tokens, "stop": [], "temperature": 0.0},
        }

    def gate(self, action: str = "", **body: Any) -> dict[str, Any]:
        """Ask for a change of the gate, or how it stands."""
        address = f"/adapters/{self.run}"
        answer = self.client.post(f"{address}/{action}", **body) if action else self.client.http.get(address)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def has_ended(self, stream: SampleStream) -> bool:
        """Ask whether the sample has ended, whatever of its stream was read."""
        return self.client.http.get(f"/samples/{stream.request_id}").status_code == 200

    def until_in_flight(self, count: int) -> None:
        """Ask until so many of the adapter's samples are in flight."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.gate()["in_flight"] != count:
            assert time.monotonic() < deadline

    def until_drawn_from(self, version: str) -> None:
        """Ask until what is in flight is said to be drawn from ``version``, and from no other."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while list(self.gate()["versions"].values()) != [[version]]:
            assert time.monotonic() < deadline

    def says(self, word: str) -> str:
        """Make ``word`` what live samples say from now on; returns the version."""
        version: str = self.gate("reload", path=self.paths[word])["version"]
        return version

    def acted_on(self, act: Callable[[], T], *, tokens: int = 5, n: int = 1) -> tuple[SampleStream, T]:
        """Begin a sample and act while it is drawn, after so many tokens. Return it and what ``act`` returned.

        On a busy machine it may have ended before: then the gate is opened, and another is begun.
        """
        for _ in range(TRIES):
            sample = self.stream(n=n).until_tokens(tokens)
            found = act()
            if not self.has_ended(sample):
                return sample, found
            self.gate("resume")
        raise AssertionError("every time the sample had ended before")

    def swapped(self, word: str | None) -> tuple[SampleStream, list[int]]:
        """Have a sample that says meow go on from another version; return it and its tokens.

        ``word`` is the other version's, None for the newest's. On a busy machine a sample may end before, or soon after:
        then another is begun.
        """
        for _ in range(TRIES):
            old = self.says(MEOW)
            sample = self.stream(tokens=TAUGHT).until_tokens(20)
            new = self.gate("reload")["version"] if word is None else self.says(word)
            made = sample.finish()["sequences"][0]["tokens"]
            (spans,) = [sequence["spans"] for sequence in self.report(sample)["sequences"]]
            assert [span["version"] for span in spans] in ([old], [old, new])
            if spans[-1]["start"] and TAUGHT - spans[-1]["start"] > 40:
                return sample, made
        raise AssertionError("every time the sample had ended before")

    def pinned(self, word: str, number: int) -> str:
        """A sampler of the word's checkpoint, of the session's place ``number``."""
        answer = self.client.post(
            "/create_sampling_session",
            session_id=self.sampler.rsplit(":sample:", 1)[0],
            sampling_session_seq_id=number,
            model_path=self.paths[word],
        )
        sampler: str = answer.json()["sampling_session_id"]
        return sampler

    def uncut(self, word: str) -> list[int]:
        """An undisturbed sample of the word's checkpoint; asked for once."""
        if word not in self.said:
            stream = self.stream(sampler=self.pinned(word, 100 + sorted(self.paths).index(word)))
            self.said[word] = stream.finish()["sequences"][0]["tokens"]
        return self.said[word]

    def cuts(self, stream: SampleStream) -> int:
        """Return the number of cuts of a finished sample."""
        attempts: int = self.report(stream)["attempts"]
        return attempts - 1

    def report(self, stream: SampleStream) -> dict[str, Any]:
        """Return the report of a sample."""
        answer = self.client.http.get(f"/samples/{stream.request_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def text(tokens: list[int]) -> str:
    """The tiny tokenizer's ids are bytes."""
    return bytes(tokens).decode()


def lessons(word: str, step: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and weights of a text of the word, and of one that turns to it anywhere, as a sample that spans a swap does."""
    found = []
    for before in (0, 1 + 17 * step % (TAUGHT * 3 // 4)):
        said = (MEOW * TAUGHT)[:before] + word * TAUGHT
        line = PROMPT + [ord(letter) for letter in said[:TAUGHT]]
        unwanted = len(PROMPT) + before - 1
        found.append((line, [0.0] * unwanted + [1.0] * (len(line) - 1 - unwanted)))
    return found


def teach(client: RawClient, words: dict[str, int]) -> Speaker:
    """Train a run until it says each of the words in turn, greedily; a checkpoint of each."""
    session = client.session()
    run = client.model(BASE_NAME, session, rank=32)
    paths: dict[str, str] = {}
    seq_id = 0
    for word in words:
        for step in range(words[word]):
            seq_id += 2
            computed = client.passes(lesson_message(run, seq_id - 1, lessons(word, step)))
            # Small at the end: at the first rate the last steps leave it to chance how well it has learned.
            stepped = client.step(run, seq_id, learning_rate=5e-3 if 3 * step < 2 * words[word] else 1e-3)
        client.result(computed)
        client.result(stepped)
        seq_id += 1
        saved = client.post("/save_weights_for_sampler", model_id=run, seq_id=seq_id, path=word.strip())
        paths[word] = client.result(saved)["path"]
    live = client.post(
        "/save_weights_for_sampler", model_id=run, seq_id=seq_id + 1, sampling_session_seq_id=0, kind="inflight"
    )
    return Speaker(client, run, client.result(live)["sampling_session_id"], paths)
