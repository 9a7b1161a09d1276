"""A tenant's adapters through the real ``openai`` client: chat, completions, models, streams; another tenant beside."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import BARK, MEOW, PROMPT, Speaker, teach, text

SAY = text(PROMPT)
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does the cat say?"}]


@pytest.fixture(scope="module")
def cat(either: Service) -> Iterator[Speaker]:
    """Says meow or bark after "Say: "."""
    client = RawClient(either.base_url, either.key)
    yield teach(client, {MEOW: 25, BARK: 25})
    client.close()


@pytest.fixture(scope="module")
def client(either: Service) -> Iterator[openai.OpenAI]:
    """The first tenant's."""
    with openai.OpenAI(base_url=f"{either.base_url}/v1", api_key=either.key, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(either: Service) -> Iterator[openai.OpenAI]:
    """The second tenant's."""
    with openai.OpenAI(base_url=f"{either.base_url}/v1", api_key=either.other_key, max_retries=0) as made:
        yield made


def completion(client: openai.OpenAI, model: str) -> str:
    """Twenty greedy tokens after the taught prompt."""
    return client.completions.create(model=model, prompt=SAY, max_tokens=20, temperature=0).choices[0].text


def test_every_path_run_and_base_is_a_model(cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {BASE_NAME, cat.run, *cat.paths.values()} <= set(names)
    assert client.models.retrieve(cat.paths[MEOW]).id == cat.paths[MEOW]
    assert not {cat.run, *cat.paths.values()} & {model.id for model in stranger.models.list()}
    cat.says(BARK)
    assert completion(client, cat.paths[MEOW]) == MEOW * 4
    assert completion(client, cat.paths[BARK]) == completion(client, cat.run)
    assert completion(client, cat.run) != MEOW * 4
    assert completion(client, BASE_NAME) == completion(stranger, BASE_NAME)
    assert completion(client, BASE_NAME) not in (MEOW * 4, completion(client, cat.run))


def test_a_run_as_a_model_follows_its_newest_version(cat: Speaker, client: openai.OpenAI) -> None:
    for word in (MEOW, BARK, MEOW):
        cat.says(word)
        assert completion(client, cat.run).startswith(word.strip())
        assert completion(client, cat.paths[BARK]).startswith("bark")


def test_a_stream_says_what_the_whole_answer_says(cat: Speaker, client: openai.OpenAI) -> None:
    whole = client.completions.create(model=cat.paths[MEOW], prompt=SAY, max_tokens=20, temperature=0)
    parts = list(
        client.completions.create(
            model=cat.paths[MEOW],
            prompt=SAY,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text == MEOW * 4
    assert parts[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 20)
    reasons = [part.choices[0].finish_reason for part in parts if part.choices]
    assert (reasons[-1], set(reasons[:-1])) == ("length", {None})


def test_stop_strings_end_the_text_before_them(cat: Speaker, client: openai.OpenAI) -> None:
    """``stop`` comes beside the model's own end, and nothing of it is said, streamed or not."""
    asked = {"model": cat.paths[MEOW], "prompt": SAY, "max_tokens": 40, "temperature": 0, "stop": ["w m", "zz"]}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("meo", "stop")
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].text for part in streamed if part.choices) == "meo"


def test_chat_uses_the_bases_template_and_reports_logprobs(cat: Speaker, client: openai.OpenAI) -> None:
    asked = {"model": cat.run, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    first, second = whole.choices
    assert (first.message.role, first.message.content) == ("assistant", second.message.content)
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert len(first.logprobs.content) == 12
    for entry in first.logprobs.content:
        assert entry.logprob == pytest.approx(max(one.logprob for one in entry.top_logprobs), abs=1e-4)
    said = ["", ""]
    for part in client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == [first.message.content, second.message.content]
    template = "<|im_start|>user\nWhat does the cat say?<|im_end|>\n<|im_start|>assistant\n"
    assert whole.usage is not None
    # Each of the template's marks is one token, every other character too.
    marks = template.count("<|im_start|>") + template.count("<|im_end|>")
    bare = template.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert whole.usage.prompt_tokens == len(bare) + marks


def test_several_prompts_and_token_ids_are_answered_in_order(cat: Speaker, client: openai.OpenAI) -> None:
    made = client.completions.create(model=cat.paths[MEOW], prompt=[SAY, SAY], max_tokens=5, temperature=0, n=2)
    assert [(choice.index, choice.text) for choice in made.choices] == [(place, MEOW) for place in range(4)]
    ids = client.completions.create(model=cat.paths[MEOW], prompt=[PROMPT], max_tokens=5, temperature=0, logprobs=1)
    assert ids.choices[0].text == MEOW
    logprobs = ids.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (list(MEOW), [0, 1, 2, 3, 4])


def test_echo_puts_each_prompt_before_its_completions(cat: Speaker, client: openai.OpenAI) -> None:
    asked = {"model": cat.paths[MEOW], "prompt": [SAY, "Now: "], "max_tokens": 5, "temperature": 0, "n": 2}
    plain = [choice.text for choice in client.completions.create(**asked).choices]
    echoed = client.completions.create(**asked, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        prompt + said for prompt, said in zip([SAY, SAY, "Now: ", "Now: "], plain, strict=True)
    ]
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="echo does not come with stream"):
        client.completions.create(**asked, echo=True, stream=True)


def test_an_echoed_prompt_is_scored_as_the_same_tokens_were_when_they_were_drawn(
    cat: Speaker, client: openai.OpenAI
) -> None:
    """Evaluation harnesses score texts so. The tolerance is float32's, over two orders of summing."""
    asked = {"model": cat.paths[MEOW], "temperature": 0, "logprobs": 2}
    drawn = client.completions.create(**asked, prompt=SAY, max_tokens=5).choices[0]
    said = SAY + drawn.text
    for tokens in (0, 1):
        scored = client.completions.create(**asked, prompt=[said, SAY], max_tokens=tokens, echo=True).choices
        told = scored[0].logprobs
        assert told is not None
        assert drawn.logprobs is not None
        assert scored[0].text == said + ("" if tokens == 0 else scored[0].text[len(said) :])
        assert "".join(told.tokens) == scored[0].text
        assert told.text_offset == list(range(len(said) + tokens))
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert told.token_logprobs[len(SAY) : len(said)] == pytest.approx(drawn.logprobs.token_logprobs, abs=1e-4)
        for place in range(len(SAY), len(said)):
            assert told.top_logprobs[place] == pytest.approx(drawn.logprobs.top_logprobs[place - len(SAY)], abs=1e-4)
        beside = scored[1].logprobs
        assert beside is not None
        assert beside.token_logprobs[1 : len(SAY)] == pytest.approx(told.token_logprobs[1 : len(SAY)], abs=1e-4)


def test_a_repeat_with_one_idempotency_key_is_the_same_sample(cat: Speaker, client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "once"}
    ids = {
        client.completions.create(model=cat.paths[MEOW], prompt=SAY, max_tokens=5, extra_headers=headers).id
        for _ in range(2)
    }
    assert len(ids) == 1
    assert client.completions.create(model=cat.paths[MEOW], prompt=SAY, max_tokens=5).id not in ids


def test_a_stream_waits_while_its_adapter_is_paused_and_the_neighbours_does_not(
    cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    cat.says(MEOW)
    cat.gate("pause", mode="keep")
    try:
        stream = client.completions.create(model=cat.run, prompt=SAY, max_tokens=10, temperature=0, stream=True)
        assert completion(stranger, BASE_NAME)
        assert cat.gate()["state"] == "paused"
    finally:
        cat.gate("resume")
    assert "".join(part.choices[0].text for part in stream if part.choices) == MEOW * 2


def test_errors_come_as_the_client_knows_them(
    cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI, either: Service
) -> None:
    for name in (cat.run, cat.paths[MEOW], "gpt-4o"):
        with pytest.raises(openai.NotFoundError):
            completion(stranger, name)
    with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
        completion(client, "gpt-4o")
    with openai.OpenAI(base_url=f"{either.base_url}/v1", api_key="tml-nobody", max_retries=0) as nobody:
        for call in (nobody.models.list, lambda: completion(nobody, BASE_NAME)):
            with pytest.raises(openai.AuthenticationError):
                call()
    for wrong in (
        {"temperature": -1},
        {"presence_penalty": 3.0},
        {"suffix": "x"},
        {"max_tokens": 10**9},
        {"stream": True, "logprobs": 3},
        {"n": 0},
        {"stop": [""]},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{"model": BASE_NAME, "prompt": SAY, **wrong})
        assert refused.value.code == "invalid_request"
    with pytest.raises(openai.BadRequestError, match="functions is not offered"):
        client.chat.completions.create(model=BASE_NAME, messages=MESSAGES, functions=[{"name": "f", "parameters": {}}])
    assert completion(client, cat.paths[MEOW]) == MEOW * 4


def test_a_run_that_publishes_to_nobody_is_sampled_from_its_newest_checkpoint(
    either: Service, client: openai.OpenAI
) -> None:
    raw = RawClient(either.base_url, either.key)
    run = raw.model(BASE_NAME)
    with pytest.raises(openai.NotFoundError):
        completion(client, run)
    for number, name in enumerate(("first", "second")):
        saved = raw.post("/save_weights_for_sampler", model_id=run, seq_id=number + 1, path=name)
        raw.result(saved)
        request = client.completions.create(model=run, prompt=SAY, max_tokens=3, temperature=0)
        report = raw.http.get(f"/samples/{request.id.removeprefix('cmpl-')}").json()
        path = client.completions.create(model=raw_path(run, name), prompt=SAY, max_tokens=3, temperature=0)
        pinned = raw.http.get(f"/samples/{path.id.removeprefix('cmpl-')}").json()
        assert report["max_version"] == pinned["max_version"] is not None
    raw.close()


def raw_path(run: str, name: str) -> str:
    """A sampler checkpoint's address."""
    return f"tinker://{run}/sampler_weights/{name}"
