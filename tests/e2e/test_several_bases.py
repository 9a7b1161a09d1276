"""Any causal Hugging Face folder is a base, under any name; several serve side by side and are never mixed up."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, SDK_FOLDERS, Service
from tests.e2e.raw_client import RawClient, pass_message

TOKENS = [72, 101, 108, 108, 111]
_TOKENIZERS = """
import sys, warnings
warnings.simplefilter("ignore")
import tinker
from sdk_end import end

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=sys.argv[1], rank=4)
sampler = service.create_sampling_client(base_model=sys.argv[1])
tokenizers = [client.get_tokenizer() for client in (trainer, sampler)]
end({
    "tokenizer_id": trainer.get_info().model_data.tokenizer_id,
    "trainer": tokenizers[0].encode("Hello"),
    "sampler": tokenizers[1].encode("Hello"),
    "chat": all(one.chat_template for one in tokenizers),
})
"""


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 without a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def two_bases(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, gpt2_dir: Path
) -> Iterator[ServiceProcess]:
    """A service of two bases. The folder of the first is none that a client could be told of: its name has a colon."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(tiny_model_dir, folder / "a:b")
    bases = [f"{BASE_NAME}={folder / 'a:b'}", str(gpt2_dir)]
    with ServiceProcess(data=folder / "data", base_models=bases) as process:
        yield process


@pytest.mark.parametrize("sdk", [None, "0.18.2"])
def test_a_machine_without_the_hub_gets_tokenizers_from_the_service(
    two_bases: ServiceProcess, tmp_path: Path, sdk: str | None
) -> None:
    """Training and sampling clients get them in a process whose only network is the service and whose cache is empty."""
    assert two_bases.first_key is not None
    sdk_path = [] if sdk is None else [str(SDK_FOLDERS / f"tinker-{sdk}")]
    environment = {
        **os.environ,
        "HF_ENDPOINT": two_bases.base_url,
        "HF_TOKEN": two_bases.first_key,
        "HF_HOME": str(tmp_path / "hub"),
        "TINKER_BASE_URL": two_bases.base_url,
        "TINKER_API_KEY": two_bases.first_key,
        "TINKER_TELEMETRY": "0",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([*sdk_path, str(Path(__file__).parent)]),
    }
    command = [sys.executable, "-c", _TOKENIZERS, BASE_NAME]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen == {"tokenizer_id": None, "trainer": TOKENS, "sampler": TOKENS, "chat": True}


def test_two_bases_train_and_sample_side_by_side(two_bases: ServiceProcess, gpt2_dir: Path) -> None:
    assert two_bases.first_key is not None
    client = RawClient(two_bases.base_url, two_bases.first_key)
    served = client.http.get("/get_server_capabilities").json()["supported_models"]
    assert {model["model_name"]: model["max_context_length"] for model in served} == {
        BASE_NAME: 2048,
        str(gpt2_dir): 64,
    }
    found = {}
    for number, base in enumerate((BASE_NAME, str(gpt2_dir))):
        session = client.session()
        model = client.model(base, session, number)
        computed = client.passes(pass_message(model, 1, TOKENS))
        client.step(model, 2, learning_rate=1e-2)
        again = client.passes(pass_message(model, 3, TOKENS))
        losses = [client.result(promise)["metrics"]["loss:sum"] for promise in (computed, again)]
        assert losses[1] < losses[0]
        found[base] = losses[0]
        saved = client.post(
            "/save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=7, kind="inflight"
        )
        sampled = client.post(
            "/asample",
            sampling_session_id=client.result(saved)["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"tokens": TOKENS}]},
            sampling_params={"max_tokens": 4, "stop": []},
        )
        assert len(client.result(sampled)["sequences"][0]["tokens"]) == 4
    assert found[BASE_NAME] != pytest.approx(found[str(gpt2_dir)], rel=1e-3)
    client.close()


def test_pinned_sampler_stays_and_live_sampler_follows(service: Service) -> None:
    client = RawClient(service.base_url, service.key)
    session = client.session()
    model, neighbour = client.model(BASE_NAME, session, 0), client.model(BASE_NAME, session, 1, seed=2)

    def publish(run: str, seq_id: int, counter: int, kind: str) -> str:
        saved = client.post(
            "/save_weights_for_sampler", model_id=run, seq_id=seq_id, sampling_session_seq_id=counter, kind=kind
        )
        sampler: str = client.result(saved)["sampling_session_id"]
        return sampler

    def prompt_logprobs(sampler: str, seq_id: int) -> list[float]:
        sampled = client.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [{"tokens": TOKENS}]},
            sampling_params={"max_tokens": 1},
            prompt_logprobs=True,
        )
        values: list[float] = client.result(sampled)["prompt_logprobs"][1:]
        return values

    pinned, live = publish(model, 1, 0, "snapshot"), publish(model, 2, 1, "inflight")
    other = publish(neighbour, 1, 2, "inflight")
    before, other_before = prompt_logprobs(pinned, 0), prompt_logprobs(other, 0)
    assert prompt_logprobs(live, 0) == pytest.approx(before, abs=1e-5)
    for step in range(3):
        client.passes(pass_message(model, 3 + 2 * step, TOKENS))
        client.step(model, 4 + 2 * step, learning_rate=1e-2)
    newer = publish(model, 9, 3, "inflight")
    assert prompt_logprobs(pinned, 1) == pytest.approx(before, abs=1e-5)
    assert prompt_logprobs(other, 1) == pytest.approx(other_before, abs=1e-5)
    moved = prompt_logprobs(live, 1)
    assert moved != pytest.approx(before, abs=1e-2)
    assert prompt_logprobs(newer, 0) == pytest.approx(moved, abs=1e-5)
    client.close()
