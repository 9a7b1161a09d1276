"""A client of ``stream_sample``: events as they come, on a thread of its own."""

import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

DEADLINE_SECONDS = 150.0


@dataclass(frozen=True)
class StreamEvent:
    """One server-sent event."""

    name: str
    data: dict[str, Any]


@dataclass
class SampleStream:
    """One streamed sample. ``tokens`` are those of each sequence so far, as this thread has asked for them."""

    base_url: str
    key: str
    body: dict[str, Any]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    versions: list[str | None] = field(default_factory=list)
    request_id: str = ""
    done: dict[str, Any] | None = None
    _events: "queue.SimpleQueue[StreamEvent | BaseException | None]" = field(default_factory=queue.SimpleQueue)

    def start(self) -> "SampleStream":
        """Send the request; returns once it is accepted."""
        threading.Thread(target=self._read, daemon=True).start()
        accepted = self.next_event()
        assert accepted.name == "accepted", accepted
        self.request_id = accepted.data["request_id"]
        return self

    def next_event(self) -> StreamEvent:
        """The next event, noted."""
        event = self._events.get(timeout=DEADLINE_SECONDS)
        if isinstance(event, BaseException):
            raise event
        assert event is not None, "the stream ended early"
        if event.name == "tokens":
            self.tokens.setdefault(event.data["sequence"], [])[event.data["start"] :] = event.data["tokens"]
            if event.data["version"] not in self.versions[-1:]:
                self.versions.append(event.data["version"])
        elif event.name == "done":
            self.done = event.data
        return event

    def until_tokens(self, count: int) -> "SampleStream":
        """Read until sequence 0 has so many tokens."""
        while len(self.tokens.get(0, [])) < count:
            assert self.done is None, "the sample ended before"
            self.next_event()
        return self

    def until_version(self, version: str | None) -> "SampleStream":
        """Read until a token of ``version`` came."""
        while self.versions[-1:] != [version]:
            assert self.done is None, "the sample ended before"
            self.next_event()
        return self

    def finish(self) -> dict[str, Any]:
        """Read to the end; what was streamed is what the end repeats."""
        while self.done is None:
            event = self.next_event()
            assert event.name != "error", event.data
        for number, sequence in enumerate(self.done["sequences"]):
            assert self.tokens.get(number, []) == sequence["tokens"]
        return self.done

    def is_silent(self) -> bool:
        """True while all that has come was read."""
        return self._events.empty()

    def _read(self) -> None:
        try:
            with httpx.Client(timeout=DEADLINE_SECONDS, headers={"X-API-Key": self.key}) as http:
                url = f"{self.base_url}/api/v1/stream_sample"
                with http.stream("POST", url, json=self.body) as answer:
                    assert answer.status_code == 200, answer.read()
                    name = ""
                    for line in answer.iter_lines():
                        if line.startswith("event: "):
                            name = line.removeprefix("event: ")
                        elif line.startswith("data: "):
                            self._events.put(StreamEvent(name, json.loads(line.removeprefix("data: "))))
            self._events.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the events are read
            self._events.put(error)
