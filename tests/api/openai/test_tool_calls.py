"""Tool calls are read from text as it grows: each once and whole, and no plain text is lost or held for good."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai.tool_calls import CallDelta, Said, ToolCallReader

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "<tool_call> é"}}\n</tool_call>'
ARGUMENTS = {"at": "<tool_call> é"}
OTHERS = [
    '<tool_call>{"arguments": {"b": [{"c": "}"}]}, "name": "so\\u00e9"}</tool_call>',
    '<tool_call>{"name":"wait","arguments":{}, "id": 1}</tool_call>',
    '<tool_call>{"name": "a\\"b", "arguments" : {"d": {"e": "\\\\\\"}{"}, "f": "</tool_ca"}}</tool_call>',
    '<tool_call>{"name": "look"}</tool_call>',
]
NOT_CALLS = [
    "<tool_call>look</tool_call>",
    '<tool_call>{"name": 1}</tool_call>',
    '<tool_call>{"name": "look", "arguments": []}</tool_call>',
    "<tool_call>" + "[" * 5000 + "</tool_call>",
    '<tool_call>{"name": "look", "arguments": ' + '{"a": ' * 300 + "1" + "}" * 301 + "</tool_call>",
]
BROKEN = [
    '<tool_call>{"name": "look", "arguments": {"at": no}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {',
]
PIECES = st.sampled_from(
    [CALL, *OTHERS, *NOT_CALLS[:3], *BROKEN, "<tool_", "</tool_call>", "a", " ", "\n", "<", '"', "}"]
)


"""A busy machine takes its time."""


def look(index: int, arguments: str = '{"at":"<tool_call> é"}') -> CallDelta:
    return CallDelta(index, "look", arguments)


def read(parts: list[str], most: int = 128, *, tells_arguments: bool = False) -> Said:
    """All that is said when the text comes in these parts."""
    reader, whole = ToolCallReader(most, tells_arguments=tells_arguments), Said()
    begun = 0
    for said in [*map(reader.push, parts), reader.end()]:
        assert len({part.index for part in said.calls}) == len(said.calls)
        for part in said.calls:
            assert part.index == (begun if part.name is not None else begun - 1)
            begun += part.name is not None
        whole.go_on(said)
    assert reader.calls == begun == len(whole.calls)
    return whole


@given(st.lists(PIECES, max_size=8), st.data(), st.booleans())
def test_the_parts_in_which_text_comes_do_not_matter(
    pieces: list[str], data: st.DataObject, tells_arguments: bool
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts, tells_arguments=tells_arguments) == read([text], tells_arguments=tells_arguments)


@given(st.lists(st.sampled_from([CALL, *OTHERS, *NOT_CALLS[:3], "a", " ", "\n"]), max_size=8), st.integers(1, 128))
def test_calls_that_are_told_as_they_come_are_the_same_calls(pieces: list[str], most: int) -> None:
    told, whole = (read(list("".join(pieces)), most, tells_arguments=early) for early in (True, False))
    assert told.text == whole.text
    calls = [[(part.name, json.loads(part.arguments)) for part in said.calls] for said in (told, whole)]
    assert calls[0] == calls[1]


def test_arguments_are_told_as_they_come() -> None:
    reader = ToolCallReader(1, tells_arguments=True)
    assert reader.push('I look. <tool_call>{"name": "look", "arguments": ') == Said("I look.")
    assert reader.push('{"at"') == Said(calls=[CallDelta(0, "look", '{"at"')])
    assert reader.push(': "</tool') == Said(calls=[CallDelta(0, None, ': "')])
    assert reader.push('}\\"') == Said(calls=[CallDelta(0, None, '</tool}\\"')])
    assert reader.push('"}') == Said(calls=[CallDelta(0, None, '"}')])
    assert reader.push("}\n</tool_call") == Said()
    assert reader.push("> Seen.") == Said("Seen.")
    assert reader.push(' <tool_call>{"name": "look", "arguments": {"x": 1}}') == Said()
    assert (reader.end(), reader.calls) == (Said(), 1)


@pytest.mark.parametrize("rest", ["", "</tool_call>", "</tool_"])
def test_a_call_that_was_told_stays_one_and_ends_at_its_mark(rest: str) -> None:
    said = read(['x <tool_call>{"name": "look", "arguments": {"at": ', f"no{rest}"], tells_arguments=True)
    unfinished = '{"at": no' + (rest if rest == "</tool_" else "")
    assert said == Said("x", [look(0, unfinished)])
    assert read(['<tool_call>{"name": "look", "arguments": {} and more</tool_call>y'], tells_arguments=True) == Said(
        "y", [look(0, "{}")]
    )


@given(st.text(alphabet="<tool_cal/> \n"))
def test_text_without_calls_stays_as_it_is(text: str) -> None:
    assert read(list(text)) == Said(text)
    assert read([text], most=0) == Said(text)


def test_calls_are_taken_out_with_the_space_around_them() -> None:
    assert read([f"I look. \n{CALL}\n{CALL} "]) == Said("I look.", [look(0), look(1)])
    assert read([f"{CALL}\nSeen. "]) == Said("Seen. ", [look(0)])
    assert json.loads(look(0).arguments) == ARGUMENTS


def test_calls_beyond_the_most_are_dropped() -> None:
    assert read([CALL, CALL, "x"], most=1) == Said("x", [look(0)])
    assert read([CALL], most=0) == Said(CALL)


@pytest.mark.parametrize("text", [*NOT_CALLS, *BROKEN, CALL[:-1], "<tool_call>"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read([text]) == Said(text)
    assert read([text + CALL]).text.startswith(text[:5])


@pytest.mark.parametrize("tells_arguments", [False, True])
def test_text_is_said_as_soon_as_no_call_can_begin_in_it(tells_arguments: bool) -> None:
    reader = ToolCallReader(1, tells_arguments=tells_arguments)
    assert reader.push("so <tool").text == "so"
    assert reader.push("s").text == " <tools"
    assert reader.push("> <tool_call>{").text == ">"
    assert reader.end().text == " <tool_call>{"
