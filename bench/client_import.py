"""Time of the client package's import: ``python -m bench.client_import``.

Each name is imported in fresh processes, in turns with the libraries that the client uses; start of the interpreter not counted.
Prints the median of each import in milliseconds and, last, one JSON line.
"""

import argparse
import statistics
import subprocess
import sys

from bench.report import print_figures

_IMPORTS = {
    "weft_ms": "from weft_client import Weft",
    "async_weft_ms": "from weft_client import AsyncWeft",
    "weft_admin_ms": "from weft_client import WeftAdmin",
    "weft_logger_ms": "from weft_client.cookbook import WeftLogger",
    "records_ms": "import weft_client.models",
    "httpx_ms": "import httpx",
    "pydantic_ms": "from pydantic import BaseModel",
}


def milliseconds(statement: str) -> float:
    """Return the time of an import in a fresh process."""
    program = f"import time; begun = time.perf_counter(); {statement}; print(time.perf_counter() - begun)"
    return 1000 * float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(rounds):
        for name, statement in _IMPORTS.items():
            times[name].append(milliseconds(statement))
    print_figures({name: statistics.median(taken) for name, taken in times.items()}, digits=1)


if __name__ == "__main__":
    main()
