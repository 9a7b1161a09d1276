"""Tool calls are read from text as it grows: each once and whole, and no plain text is lost or held for good."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai.tool_calls import Said, ToolCall, ToolCallReader

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "<tool_call> é"}}\n</tool_call>'
LOOK = ToolCall("look", '{"at":"<tool_call> é"}')
NOT_CALLS = [
    "<tool_call>look</tool_call>",
    '<tool_call>{"name": 1}</tool_call>',
    '<tool_call>{"name": "look", "arguments": []}</tool_call>',
    "<tool_call>" + "[" * 5000 + "</tool_call>",
]
PIECES = st.sampled_from([CALL, *NOT_CALLS[:3], "<tool_", "</tool_call>", "a", " ", "\n", "<"])


def read(parts: list[str], most: int = 128) -> Said:
    """All that is said when the text comes in these parts."""
    reader, whole = ToolCallReader(most), Said()
    for said in [*map(reader.push, parts), reader.end()]:
        if said.calls:
            assert said.first_call == len(whole.calls)
        whole.text += said.text
        whole.calls += said.calls
    assert reader.calls == len(whole.calls)
    return whole


@given(st.lists(PIECES, max_size=8), st.data())
def test_the_parts_in_which_text_comes_do_not_matter(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts) == read([text])


@given(st.text(alphabet="<tool_cal/> \n"))
def test_text_without_calls_stays_as_it_is(text: str) -> None:
    assert read(list(text)) == Said(text)
    assert read([text], most=0) == Said(text)


def test_calls_are_taken_out_with_the_space_around_them() -> None:
    assert read([f"I look. \n{CALL}\n{CALL} "]) == Said("I look.", [LOOK, LOOK])
    assert read([f"{CALL}\nSeen. "]) == Said("Seen. ", [LOOK])
    assert json.loads(LOOK.arguments) == {"at": "<tool_call> é"}


def test_calls_beyond_the_most_are_dropped() -> None:
    assert read([CALL, CALL, "x"], most=1) == Said("x", [LOOK])
    assert read([CALL], most=0) == Said(CALL)


@pytest.mark.parametrize("text", [*NOT_CALLS, CALL[:-1], "<tool_call>"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read([text]) == Said(text)
    assert read([text + CALL]).text.startswith(text[:5])


def test_text_is_said_as_soon_as_no_call_can_begin_in_it() -> None:
    reader = ToolCallReader(1)
    assert reader.push("so <tool").text == "so"
    assert reader.push("s").text == " <tools"
    assert reader.push("> <tool_call>{").text == ">"
    assert reader.end().text == " <tool_call>{"
