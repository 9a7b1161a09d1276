"""Cost of an adapter's swap: ``python -m bench.swap`` (``make vllm`` first).

A ``weft serve`` process with one vLLM server of its own on the base ``small``, in float32, and two tenants who each stream from
a live sampler. One tenant has a newer version of its adapter published again and again. A swap lasts from just before the
request to the first token on the new weights. In each round a quiet time comes first, then swaps; the neighbour's gaps between
tokens are compared within a round. Afterwards every token's logprob is computed again with torch, under the version that the
stream names for the token.

With ``--bare`` the same swaps are then made at a vLLM server directly, which shows the time that vLLM itself takes. Prints a
table and, last, one JSON line. Nothing else should run meanwhile: all share the machine.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.bases import write_base
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.report import print_figures
from bench.sampling.vllm_server import server_settings
from bench.swap.bare_client import BareLoad, bare_rounds
from bench.swap.figures import Figures, bare_figures, swap_figures
from bench.swap.tenant import Round, SwapTenant
from bench.swap.version_check import score, undue_tokens, unlike_tokens
from contracts.base_model import read_base_model_facts
from engine.sampling.vllm.process import VllmProcess
from tenants.checkpoints import CHECKPOINTS
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants

BASE = "weft/base"
_CONTEXT = 1024
_WARM_UP_SWAPS = 2
_ENVIRONMENT = {
    "WEFT_VLLM_REPLICAS": "1",
    "WEFT_VLLM_CONTEXT_LENGTH": str(_CONTEXT),
    "WEFT_BASE_DTYPE": "float32",
    "WEFT_MAX_RANK": "8",
}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="in which the swaps are made")
    parser.add_argument("--quiet-seconds", type=float, default=4.0, help="without swaps, at the beginning of a round")
    parser.add_argument("--streams", type=int, default=4, help="of each of the two tenants")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument(
        "--versions", type=int, default=0, help="published in turn; 0: each swap's is one that vLLM has never had"
    )
    parser.add_argument("--base", default="small", help="tiny or small")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="WEFT_VLLM_PROMPT_TOKENS; 0: no limit")
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vLLM, spaces between")
    parser.add_argument("--bare", action="store_true", help="the same swaps without weft, too")
    return parser.parse_args()


async def stream_and_swap(
    tenants: tuple[SwapTenant, SwapTenant], options: argparse.Namespace, versions: int
) -> list[Round]:
    """Run every round while both tenants stream. The first tenant's adapter is swapped."""
    swapped, neighbour = tenants
    for tenant in tenants:
        await tenant.start(options.streams, tokens=options.tokens)
    await asyncio.sleep(options.quiet_seconds)
    number = 0
    for _ in range(_WARM_UP_SWAPS):
        number += 1
        await swapped.swap(number % versions)
    rounds = []
    for turn in range(options.rounds):
        count = options.swaps * (turn + 1) // options.rounds - options.swaps * turn // options.rounds
        found = Round()
        await found.be_quiet(options.quiet_seconds)
        for _ in range(count):
            number += 1
            found.swaps.append(await swapped.swap(number % versions))
        rounds.append(found)
    await asyncio.gather(swapped.finish(), neighbour.finish())
    return rounds


async def load(
    base_url: str, keys: list[str], vocabulary: int, options: argparse.Namespace
) -> tuple[tuple[SwapTenant, SwapTenant], list[Round]]:
    """Run the load. Return both tenants, finished, and the rounds."""
    versions = options.versions or options.swaps + _WARM_UP_SWAPS + 1
    async with (
        SwapTenant(base_url, keys[0], number=0, vocabulary=vocabulary) as swapped,
        SwapTenant(base_url, keys[1], number=1, vocabulary=vocabulary) as neighbour,
    ):
        await swapped.learn(BASE, versions)
        await neighbour.learn(BASE, 1)
        return (swapped, neighbour), await stream_and_swap((swapped, neighbour), options, versions)


async def measure_bare(folder: Path, data: Path, model: Path, options: argparse.Namespace) -> Figures:
    """Measure the same swaps of the same adapters without weft."""
    facts = read_base_model_facts(BASE, model, None)
    folders = sorted(found.parent for found in (data / CHECKPOINTS).rglob("adapter_model.safetensors"))
    settings = replace(
        server_settings(model, facts, folder / "bare.log"),
        context_length=_CONTEXT,
        max_lora_rank=int(_ENVIRONMENT["WEFT_MAX_RANK"]),
        extra=tuple(options.vllm_arguments.split()),
    )
    load = BareLoad(
        vocabulary=facts.vocabulary_size,
        streams=options.streams,
        tokens=options.tokens,
        prompt_tokens=options.prompt_tokens or None,
        swaps=options.swaps,
        rounds=options.rounds,
        quiet_seconds=options.quiet_seconds,
    )
    async with VllmProcess(settings) as server:
        neighbour, rounds = await bare_rounds(server.base_url, folders[:-1], folders[-1], load)
    return bare_figures(neighbour.streams, rounds)


def measure(folder: Path, options: argparse.Namespace) -> Figures:
    """Measure and return every figure."""
    model, data = folder / options.base, folder / "data"
    in_fresh_process(write_base, options.base, model, dtype="float32")
    vocabulary = read_base_model_facts(BASE, model, None).vocabulary_size
    keys = make_tenants(data, ["swapped", "neighbour"])
    environment = _ENVIRONMENT | {"WEFT_VLLM_ARGUMENTS": json.dumps(options.vllm_arguments.split())}
    if options.prompt_tokens:
        environment["WEFT_VLLM_PROMPT_TOKENS"] = str(options.prompt_tokens)
    with ServiceProcess(data=data, base_models=[f"{BASE}={model}"], environment=environment) as service:
        try:
            tenants, rounds = asyncio.run(load(service.base_url, keys, vocabulary, options))
        except RuntimeError:
            print(service.log_tail(), file=sys.stderr)
            raise
    figures = swap_figures(*tenants, rounds)
    samples = [sample for tenant in tenants for sample in tenant.samples]
    scored = in_fresh_process(score, model, data / CHECKPOINTS, samples)
    wrong = sum(unlike_tokens(sample) for sample in samples) + scored.wrong
    for tenant in tenants:
        wrong += sum(undue_tokens(stream.arrivals, tenant.names, tenant.asked) for stream in tenant.streams)
    if options.bare:
        figures |= asyncio.run(measure_bare(folder, data, model, options))
    return figures | {
        "wrong_version_tokens": wrong,
        "checked_tokens": scored.tokens,
        "tokens_told_apart": scored.told_apart,
    }


def main() -> None:
    """Measure and print."""
    options = parse_options()
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        figures = measure(Path(folder), options)
    print_figures(figures)
