"""A service with something to show: two tenants that train and sample through the SDK, and one whose work is held."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Event

import httpx
import tinker
from tinker import types

from engine.model.tiny_model import write_tiny_model
from testing.operator_command import weft
from testing.service_process import ServiceProcess

BASE = "weft/tiny"
_STEPS = 60
_HELD = 24
_WAITING = 3
_SECONDS = 120.0
_TEXTS = ("The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen jugs.", "How vexingly quick.")


@dataclass(frozen=True)
class World:
    """The running service: addresses of both listeners, an administrator's key of a tenant, and an operator's key.

    ``run`` is a run of the tenant, of which ``publish`` saves and loads another version.
    """

    url: str
    ops_url: str
    key: str
    operator_key: str
    run: str
    publish: Callable[[], None]


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """Run a service in ``folder`` with data that was made through it."""
    data, model = folder / "data", folder / "tiny"
    write_tiny_model(model)
    port, admin_port = _free_ports()
    environment = {"WEFT_ADMIN_PORT": str(admin_port)}
    bases = [f"{BASE}={model}"]
    with ServiceProcess(data=data, base_models=bases, port=port, environment=environment) as process:
        url = process.base_url
        aurora, boreal, cedar = _tenants(data)
        # The newest runs are those that the pictures of a run and of a comparison show.
        _die(url, aurora)
        clients = [_trained(url, aurora, seed, steps=_STEPS) for seed in range(3)]
        clients.append(_trained(url, boreal, 9, steps=_STEPS // 2))
        held = _trained(url, cedar, 5, steps=4)
        for client in clients[:3]:
            _add_metrics(url, aurora, client.model_id)
        _swap(url, aurora, clients[2])
        for meter, amount in (("train", "0.40"), ("prompt", "0.10"), ("cached_prompt", "0.02"), ("sampled", "1.20")):
            weft(data, "price", "add", f"{meter}_tokens", amount, "--base", BASE)
        _fail(clients[0])
        weft(data, "replica", "drain", "spare-0", "--base", BASE, "--reason", "new driver")
        _have_wait(data, clients[1], held)
        operator_key = weft(data, "operator", "create", "--note", "screenshots").strip()
        ended = Event()
        with ThreadPoolExecutor(len(clients) + 1) as threads:
            for client in clients:
                threads.submit(_keep_busy, client, ended)
            try:
                shown, numbers = clients[2], count(1)
                yield World(
                    url,
                    f"http://127.0.0.1:{admin_port}",
                    aurora,
                    operator_key,
                    shown.model_id,
                    lambda: threads.submit(_publish, url, aurora, shown, f"edition-{next(numbers)}").result(),
                )
            finally:
                ended.set()


def _tenants(data: Path) -> list[str]:
    """Make the tenants, and what the first of them has beside its runs; return their keys."""
    keys = [weft(data, "tenant", "create", name).strip() for name in ("aurora", "boreal", "cedar")]
    weft(data, "tenant", "set", "aurora", "--share", "2")
    weft(data, "tenant", "budget", "aurora", "--month", "5000000")
    weft(data, "key", "create", "--tenant", "aurora", "--note", "notebook", "--role", "member")
    weft(data, "project", "create", "summaries", "--tenant", "aurora")
    weft(
        data,
        "webhook",
        "set",
        "bell",
        "--tenant",
        "aurora",
        "--url",
        "https://bell.example/weft",
        "--note",
        "on-call",
    )
    weft(data, "webhook", "test", "bell", "--tenant", "aurora")
    return keys


def _have_wait(data: Path, paused: tinker.TrainingClient, held: tinker.TrainingClient) -> None:
    """Have samples of an adapter wait for its gate, and passes of a tenant for its operator."""
    sampler = paused.save_weights_and_get_sampling_client(name="evening")
    weft(data, "gate", "pause", "--adapter", paused.model_id, "--reason", "a look at step 60", "--ttl", "1800")
    weft(data, "tenant", "suspend", "cedar", "--reason", "the bill of October is open")
    for seed in range(_WAITING):
        _sample(sampler, seed)
    for _ in range(_HELD):
        held.forward_backward([_datum(_TEXTS[0])], "cross_entropy")
    _until_pending(data, _WAITING + _HELD)


def _trained(url: str, key: str, seed: int, *, steps: int) -> tinker.TrainingClient:
    """Return the client of a run that was trained, saved and sampled from."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(
        base_model=BASE, rank=8, seed=seed, user_metadata={"purpose": f"pangrams {seed}"}
    ).result()
    futures = []
    for step in range(steps):
        data = [_datum(text) for text in _TEXTS]
        futures.append(run.forward_backward(data, "cross_entropy"))
        futures.append(run.optim_step(types.AdamParams(learning_rate=3e-3 * (1 - step / (2 * steps)))))
    for future in futures:
        future.result()
    run.save_state(name="half-way").result()
    sampler = run.save_weights_and_get_sampling_client(name="first").result()
    for _ in range(3):
        _sample(sampler, seed).result()
    return run


def _sample(sampler: tinker.SamplingClient, seed: int) -> Future[types.SampleResponse]:
    """Have a prompt continued twice."""
    prompt = types.ModelInput.from_ints(list(_TEXTS[0][:12].encode()))
    params = types.SamplingParams(max_tokens=24, temperature=0.8, seed=seed)
    asked: Future[types.SampleResponse] = sampler.sample(prompt, num_samples=2, sampling_params=params)
    return asked


def _add_metrics(url: str, key: str, run: str) -> None:
    """Add own metrics of a run, as a training script's logger does."""
    points = [
        {"step": step, "metrics": {"reward": 1 - 0.9 * 0.95**step, "eval/loss": 5 * 0.93**step + 0.2 * (step % 3)}}
        for step in range(1, _STEPS + 1)
    ]
    address = f"{url}/api/weft/v1/runs/{run}/points"
    httpx.post(address, json={"points": points}, headers={"X-API-Key": key}, timeout=_SECONDS).raise_for_status()


def _fail(run: tinker.TrainingClient) -> None:
    """Have an operation fail, so that the page of errors has one."""
    with suppress(tinker.TinkerError):
        run.load_state(f"tinker://{run.model_id}/weights/never-saved").result()


def _die(url: str, key: str) -> None:
    """Have a script end by an error of its own, which the SDK reports."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(base_model=BASE, rank=8, seed=7, user_metadata={"purpose": "ablation"})
    telemetry = run.result().get_telemetry()
    if telemetry is None:
        raise RuntimeError("the SDK's telemetry is off (TINKER_TELEMETRY)")
    with suppress(KeyError), telemetry.capture_exceptions(fatal=True):
        batch: dict[str, str] = {"prompt": _TEXTS[0]}
        print(batch["completion"])


def _swap(url: str, key: str, run: tinker.TrainingClient) -> None:
    """Draw a sample by the run's name while two versions are saved and loaded, so that each made a part of it."""
    asked = {"model": run.model_id, "prompt": _TEXTS[1][:20], "max_tokens": 320, "temperature": 0.7, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    names = iter(("evening", "night"))
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=_SECONDS) as answer:
        for pieces, _ in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            if pieces in (60, 160):
                run.forward_backward([_datum(_TEXTS[1])], "cross_entropy").result()
                run.optim_step(types.AdamParams(learning_rate=3e-3)).result()
                run.save_weights_for_sampler(name=next(names)).result()
                _reload(url, key, run)


def _publish(url: str, key: str, run: tinker.TrainingClient, name: str) -> None:
    """Save another version, and have live samplers follow it."""
    run.save_weights_for_sampler(name=name).result()
    _reload(url, key, run)


def _reload(url: str, key: str, run: tinker.TrainingClient) -> None:
    address = f"{url}/api/v1/adapters/{run.model_id}/reload"
    httpx.post(address, json={}, headers={"X-API-Key": key}, timeout=_SECONDS).raise_for_status()


def _keep_busy(run: tinker.TrainingClient, ended: Event) -> None:
    """Train on while the pages are looked at: a step a second, so that curves grow and little else changes."""
    while not ended.wait(1.0):
        computed = run.forward_backward([_datum(text) for text in _TEXTS], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        computed.result()


def _datum(text: str) -> types.Datum:
    tokens = list(text.encode())
    weights = types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1])
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def _until_pending(data: Path, number: int) -> None:
    """Wait until the held tenant's operations are accepted. Raises ``TimeoutError``."""
    deadline = time.monotonic() + _SECONDS
    while sum(line["pending"] for line in json.loads(weft(data, "queue", "show", "--json"))["items"]) < number:
        if time.monotonic() > deadline:
            raise TimeoutError("the held tenant's operations were not accepted")
        time.sleep(0.2)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
