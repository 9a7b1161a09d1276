"""Rate of samples through weft: ``python -m bench.sampling`` (``make vllm`` first).

One vLLM server on the base ``small``, in float32, and a ``weft serve`` process that samples on it. The same samples over four
adapters are asked, in turns, of:

- weft (``asample`` and ``retrieve_future``)
- the server itself, streamed, as weft must ask to be able to cut a sample
- the server itself, not streamed ("whole")

``router_ratio`` is weft's rate over the server's; of the two ratios, streamed and whole, it is the smaller one. Then the
replica that weft has without vLLM is measured, by itself and through a service. Prints tables and, last, one JSON line.
Nothing else should run meanwhile: all share the machine.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from bench.bases import write_base
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.report import rounded
from bench.sampling.in_process import measure_torch
from bench.sampling.vllm_server import measure_vllm, show
from contracts.base_model import read_base_model_facts
from testing.tenants import make_tenants

BASE = "weft/base"
_RATIO_AT = 32


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="small", help="tiny or small")
    parser.add_argument("--concurrent", default="1,8,32,64", help="samples at a time, one row each")
    parser.add_argument("--rounds", type=int, default=5, help="of each row: every contestant takes a turn")
    parser.add_argument("--samples-each", type=int, default=3, help="of each place of a turn, at least 4 in all")
    parser.add_argument("--sdk-concurrent", type=int, default=_RATIO_AT, help="the row in which the SDK takes part")
    parser.add_argument("--apart", action="store_true", help="vLLM alone on the first core, all others on the rest")
    parser.add_argument("--no-vllm", action="store_true", help="only the replica inside weft")
    parser.add_argument("--no-torch", action="store_true", help="only vLLM")
    return parser.parse_args()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure and return every figure."""
    model = folder / options.base
    in_fresh_process(write_base, options.base, model, dtype="float32")
    facts = read_base_model_facts(BASE, model, None)
    figures: dict[str, object] = {}
    if not options.no_vllm:
        data = folder / "data-vllm"
        (key,) = make_tenants(data, ["sampling"])
        rows = asyncio.run(measure_vllm(folder, facts, data, key, options))
        figures["rows"] = [rounded(row) for row in rows]
        ratios = [round(row["router_ratio"], 4) for row in rows if row["concurrent"] == _RATIO_AT]
        figures["router_ratio"] = ratios[0] if ratios else None
    if not options.no_torch:
        data = folder / "data-torch"
        (key,) = make_tenants(data, ["sampling"])
        # In a process of its own: in this process OpenMP read its settings before they were set.
        found = in_fresh_process(measure_torch, facts, data, key, options)
        show(found)
        figures |= rounded(found)
    return figures


def main() -> None:
    """Measure and print."""
    options = parse_options()
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        figures = measure(Path(folder), options)
    print(json.dumps(figures))
