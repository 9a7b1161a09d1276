"""Rate of many tenants training at once: ``python -m bench.training``.

Compares, for a number of tenants with an operation each: weft's fused pass; plain PEFT, one tenant after another; one
tenant with the whole batch; and a ``weft serve`` process with the real SDK. Prints a table and, last, one JSON line.
Rates are tokens a second of whole training steps, forward, backward and AdamW. Nothing else should run meanwhile.

On a GPU machine: ``python -m bench.training --base large --device cuda --dtype bfloat16``.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.bases import write_base
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.report import rounded
from bench.training.row import RowTask, ServiceAddress, measure_row
from bench.workload import OperationShape
from testing.cluster_process import started_service

Row = dict[str, float | str | None]
_COLUMNS = (
    ("base", "base"),
    ("tenants", "tenants"),
    ("sequences", "seqs"),
    ("length", "length"),
    ("fused_tokens_per_s", "fused t/s"),
    ("sequential_peft_tokens_per_s", "sequential"),
    ("single_peft_tokens_per_s", "1 (PEFT)"),
    ("single_engine_tokens_per_s", "1 (engine)"),
    ("service_tokens_per_s", "service"),
    ("ratio_to_sequential", "x sequent."),
    ("ratio_to_single", "x single"),
    ("ratio_service_to_engine", "serv/eng"),
    ("client_cpu_share", "client CPU"),
    ("idle_cores", "idle cores"),
    ("share_of_floor", "of floor"),
    ("peak_rss_mib", "RSS MiB"),
)
_WIDTH = 11


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", "--base", default="small", help="of tiny, small, large; comma between")
    parser.add_argument("--tenants", default="1,4,16,64", help="numbers of tenants")
    parser.add_argument("--operations", default="1x64,4x128", help="sequences x length of a tenant's operation")
    parser.add_argument("--repeats", type=int, default=5, help="most rounds of a row")
    parser.add_argument("--row-seconds", type=float, default=15.0, help="no round of a row begins after this time")
    parser.add_argument("--service-tenants", default="1,16", help="rows that also measure the service")
    parser.add_argument("--cluster", action="store_true", help="the service is `weft up`, not `weft serve`")
    parser.add_argument("--no-service", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the frozen base")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Parse numbers such as ``1,4,16``."""
    return [int(part) for part in text.split(",") if part]


@contextmanager
def serving(base: str, model: Path, options: argparse.Namespace) -> Iterator[ServiceAddress | None]:
    """Run a service of one base with as many tenants as any row needs. Yields None without ``--service-tenants``."""
    tenants = [] if options.no_service else numbers(options.service_tenants)
    if not tenants:
        yield None
        return
    data = model.parent / f"{base}-data"
    names = [f"tenant{number}" for number in range(max(tenants))]
    environment = {"WEFT_DEVICE": options.device, "WEFT_BASE_DTYPE": options.dtype}
    bases = [f"{base}={model}"]
    started = started_service(
        data=data, base_models=bases, tenants=names, environment=environment, is_cluster=options.cluster
    )
    with started as (service, keys):
        yield ServiceAddress(service.base_url, keys, service.pid)


def measure_base(base: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every row of one base as soon as the row is measured."""
    model = folder / base
    in_fresh_process(write_base, base, model, dtype=options.dtype)
    with serving(base, model, options) as service:
        for operation in options.operations.split(","):
            for tenants in numbers(options.tenants):
                address = None
                if service is not None and tenants in numbers(options.service_tenants):
                    address = replace(service, keys=service.keys[:tenants])
                task = RowTask(
                    base=base,
                    model=model,
                    tenants=tenants,
                    shape=OperationShape.parse(operation),
                    device=options.device,
                    dtype=options.dtype,
                    repeats=options.repeats,
                    seconds=options.row_seconds,
                    service=address,
                )
                yield in_fresh_process(measure_row, task)


def shown(value: float | str | None) -> str:
    """Return a value as a cell of the table."""
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def main() -> None:
    """Measure and print."""
    options = parse_options()
    prepare()
    rows: list[Row] = []
    print("".join(f"{title:>{_WIDTH}}" for _, title in _COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for base in options.bases.split(","):
            for row in measure_base(base, Path(folder), options):
                rows.append(rounded(row))
                print("".join(f"{shown(row[name]):>{_WIDTH}}" for name, _ in _COLUMNS), flush=True)
    print(json.dumps({"rows": rows}))
