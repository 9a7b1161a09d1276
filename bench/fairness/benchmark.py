"""Fairness between tenants: ``python -m bench.fairness``.

A ``weft serve`` process on the base ``small`` and real SDK clients, every tenant with its own key. Three light tenants train
alone, beside many normal tenants, and beside one that floods; how long one full pass takes is measured on the trainer
itself. Then a light tenant draws short samples, alone and beside 4,096 long ones of another, and equal tenants draw as many
as they can; how much longer a full batch's step takes is measured on the replica itself. Prints a table and, last, one JSON
line. Nothing else should run meanwhile: clients and service share the machine.
"""

import argparse
import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.bases import write_base
from bench.fairness.batch_steps import in_process_steps, vllm_steps
from bench.fairness.samples import EQUAL_TENANTS, LONG_TOKENS, Place, measure_samples
from bench.fairness.training import BASE, NORMAL, measure
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.report import print_figures
from bench.sampling.vllm_server import SERVICE_ENVIRONMENT, server_settings
from contracts.base_model import read_base_model_facts
from engine.sampling.vllm.process import VllmProcess
from store.settings import Settings
from testing.cluster_process import started_service


def samples(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of samples on a service of its own, with ``--vllm`` on a vLLM server."""
    model = folder / f"{options.base}-samples"
    in_fresh_process(write_base, options.base, model, dtype="float32")
    if not options.vllm:
        sequences = options.sequences or Settings.model_fields["sampler_batch_sequences"].default
        steps = in_fresh_process(in_process_steps, BASE, model, sequences, LONG_TOKENS)
        return steps.figures() | _served(folder, model, {"WEFT_SAMPLER_BATCH_SEQUENCES": str(sequences)}, options)
    sequences = options.sequences or Settings.model_fields["vllm_sequences"].default
    with _vllm(folder, model, sequences) as url:
        steps = in_fresh_process(vllm_steps, BASE, model, url, folder, sequences, LONG_TOKENS)
        environment = SERVICE_ENVIRONMENT | {"WEFT_VLLM_URLS": json.dumps([url]), "WEFT_VLLM_SEQUENCES": str(sequences)}
        return steps.figures() | _served(folder, model, environment, options)


def _served(folder: Path, model: Path, environment: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tenants = ["light", "flood", *(f"equal{number}" for number in range(EQUAL_TENANTS))]
    with started_service(
        data=folder / "samples",
        base_models=[f"{BASE}={model}"],
        tenants=tenants,
        environment=environment | {"WEFT_METRICS_PORT": str(port)},
    ) as (service, keys):
        metrics_url = f"http://127.0.0.1:{port}/metrics"
        return measure_samples(
            Place(service.base_url, metrics_url, BASE, keys[0], keys[1], keys[2:]), seconds=options.seconds
        )


@contextmanager
def _vllm(folder: Path, model: Path, sequences: int) -> Iterator[str]:
    """Run a vLLM server, as weft would start it, and yield its address."""
    facts = read_base_model_facts(BASE, model, None)
    server = VllmProcess(server_settings(model, facts, folder / "vllm.log", max_sequences=sequences))
    with asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield server.base_url
        finally:
            runner.run(server.stop())


def _worse(trained: dict[str, float], sampled: dict[str, float]) -> dict[str, float]:
    """Return the figures that training and samples share: the worse one of each."""
    names = ("flood_tokens_per_s_ratio", "jain_index")
    return {name: min(sampled[f"sample_{name}"], trained.get(name, float("inf"))) for name in names}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="small", help="tiny, small or large")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--normal", type=int, default=NORMAL.tenants, help="number of normal tenants")
    parser.add_argument("--pass-tokens", type=int, default=None, help="tokens of one full pass [the service's budget]")
    parser.add_argument("--cluster", action="store_true", help="the training service is `weft up`, not `weft serve`")
    parser.add_argument("--samples", action="store_true", help="measure samples only, not training")
    parser.add_argument("--vllm", action="store_true", help="samples are drawn on a vLLM server, not in process")
    parser.add_argument("--sequences", type=int, default=None, help="of one tenant in a batch [the service's default]")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        trained = {} if options.samples else measure(folder, options)
        sampled = samples(folder, options)
    print_figures(trained | sampled | _worse(trained, sampled))
