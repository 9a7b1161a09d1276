"""The dashboard beside training: ``python -m bench.dashboard``.

A ``weft serve`` process on the tiny base. Four tenants' clients train through the real SDK, in turns with fifty viewers of their
runs' pages and with none; the viewers are real streams of the pages' events. Then Chromium opens some of the pages: how long
after a step's result is there is its point on the screen, and what do axe, the console and the content policy say. Last the
list of ten thousand runs is asked for, by pages and by filters, while the clients train. Prints a table and, last, one JSON
line. Nothing else should run meanwhile: viewers, clients and service share the machine.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.clients.sdk_clients import LoadReport, SdkClients
from bench.dashboard.chromium import OpenPages, chromium
from bench.dashboard.filling import fill
from bench.dashboard.viewers import Viewer, Viewers
from bench.processes.cpu import cpu_seconds
from bench.report import print_figures
from bench.workload import OperationShape
from cli.administration import on_database
from engine.model.tiny_model import write_tiny_model
from store.settings import Settings
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants

BASE_NAME = "weft/tiny"
_SHAPE = OperationShape(8, 64)
_RUNS = 4
_VOCABULARY = 300
_STREAMS_OF_SESSION = 4
_REQUESTS = 120
_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """The service, a tenant's key and its runs that train, and the clients that train them."""

    base_url: str
    pid: int
    key: str
    runs: list[str]
    clients: SdkClients

    def cookies(self, count: int) -> list[str]:
        """Log in as often as ``count`` streams need, and return the cookies."""
        return [log_in(self.base_url, self.key) for _ in range(math.ceil(count / _STREAMS_OF_SESSION))]

    def train(self, seconds: float) -> LoadReport:
        """Train for that long."""
        self.clients.start_run(_SHAPE, vocabulary=_VOCABULARY, in_flight=1, seconds=seconds)
        return self.clients.finish_run()

    def steps_of(self, run: str) -> int:
        """Return how many steps the run has taken."""
        told = httpx.get(f"{self.base_url}/api/weft/v1/runs/{run}", headers={"X-API-Key": self.key}, timeout=_TIMEOUT)
        steps: int = told.raise_for_status().json()["optimizer_steps"]
        return steps


def log_in(base_url: str, key: str) -> str:
    """Begin a web session and return its cookie, as a header has it."""
    headers = {"Origin": base_url, "Sec-Fetch-Site": "same-origin"}
    answer = httpx.post(f"{base_url}/ui/login", data={"key": key}, headers=headers, timeout=_TIMEOUT)
    return answer.headers["set-cookie"].partition(";")[0]


@dataclass(frozen=True, slots=True)
class Turn:
    """Training for a while. ``cpu_ms``: processor time of the service for a step; ``late``: seconds from result to viewer."""

    steps_per_s: float
    cpu_ms: float
    late: list[float] = field(default_factory=list)
    wrong: int = 0


def turn_alone(place: Place, seconds: float) -> Turn:
    """Train with nobody watching."""
    began = cpu_seconds(place.pid)
    return _turn(place.train(seconds), cpu_seconds(place.pid) - began)


def _turn(report: LoadReport, cpu_s: float, late: Sequence[float] = (), wrong: int = 0) -> Turn:
    steps = sum(len(one) for one in report.steps)
    return Turn(steps / report.wall_s, 1e3 * cpu_s / steps, list(late), wrong)


async def watched_turn(place: Place, viewers: int, seconds: float, cookies: list[str]) -> Turn:
    """Train beside viewers, and count points that were missing or came twice."""
    begins = {run: place.steps_of(run) for run in place.runs}
    watching = [Viewer(run, begins[run]) for run in (place.runs[number % _RUNS] for number in range(viewers))]
    async with Viewers(place.base_url, cookies, watching):
        began = cpu_seconds(place.pid)
        report = await asyncio.to_thread(place.train, seconds)
        used = cpu_seconds(place.pid) - began
        wanted = {run: place.steps_of(run) for run in place.runs}
        async with asyncio.timeout(_TIMEOUT):
            for one in watching:
                await one.until(wanted[one.run])
    late: list[float] = []
    for number, one in enumerate(watching):
        ends = [end for _, end in report.steps[number % _RUNS]]
        late += [max(0.0, came - end) for came, end in zip(one.came, ends, strict=False)]
    return _turn(report, used, late, sum(one.wrong for one in watching))


def measure_throughput(place: Place, *, viewers: int, turns: int, seconds: float) -> dict[str, float]:
    """Return the ratio of the steps a second beside viewers to those without, turn by turn."""
    cookies = place.cookies(viewers)
    place.train(seconds / 2)
    alone, beside = [], []
    for turn in range(turns):
        # Each first in half of the turns: what is second finds warmer caches, and a longer run.
        if turn % 2 == 0:
            alone.append(turn_alone(place, seconds))
        beside.append(asyncio.run(watched_turn(place, viewers, seconds, cookies)))
        if turn % 2 == 1:
            alone.append(turn_alone(place, seconds))
    pairs = list(zip(alone, beside, strict=True))
    return {
        "throughput_ratio": statistics.median(watched.steps_per_s / one.steps_per_s for one, watched in pairs),
        "steps_per_s_alone": statistics.median(one.steps_per_s for one in alone),
        "steps_per_s_watched": statistics.median(one.steps_per_s for one in beside),
        "cpu_ratio": statistics.median(watched.cpu_ms / one.cpu_ms for one, watched in pairs),
        "cpu_ms_a_step_alone": statistics.median(one.cpu_ms for one in alone),
        "cpu_ms_a_step_watched": statistics.median(one.cpu_ms for one in beside),
        "point_to_viewer_p95_ms": 1e3 * _p95([late for one in beside for late in one.late]),
        "wrong_points": sum(one.wrong for one in beside),
    }


def measure_pixels(place: Place, *, pages: int, seconds: float) -> dict[str, float]:
    """Return how long after its result a step is on the screen, and what the pages were found with."""
    with chromium() as browser, ThreadPoolExecutor(1) as pool:
        opened = OpenPages(browser, place.base_url, place.key)
        shown = [place.runs[number % _RUNS] for number in range(min(pages, _STREAMS_OF_SESSION))]
        begins = [place.steps_of(run) for run in shown]
        for run in shown:
            opened.open_run(run)
        apart = time.time() - time.monotonic()
        report = pool.submit(place.train, seconds).result()
        time.sleep(2.0)
        late = []
        for number, drawn in enumerate(opened.drawn()):
            ends = [end + apart for _, end in report.steps[place.runs.index(shown[number])]]
            late += _late(ends, begins[number], drawn)
        compared = "&".join(f"run={run}" for run in place.runs)
        opened.check_all(["/ui/runs", f"/ui/runs/compare?{compared}", "/ui/runs?state=failed"])
        found = opened.findings
        for told in found.told:
            print(told)
        opened.close()
    return {
        "point_to_pixel_p50_ms": 1e3 * statistics.median(late),
        "point_to_pixel_p95_ms": 1e3 * _p95(late),
        "csp_violations": found.csp_violations,
        "console_errors": found.console_errors,
        "axe_serious": found.axe_serious,
    }


def _late(ends: Sequence[float], begin: int, drawn: Sequence[tuple[int, float]]) -> list[float]:
    """Return for each step the seconds from its result to the first drawing that has it; a step without one is never drawn."""
    late = []
    for number, end in enumerate(ends, begin + 1):
        late.append(max(0.0, next((at for step, at in drawn if step >= number), math.inf) - end))
    return late


def measure_list(place: Place, *, seconds: float) -> dict[str, float]:
    """Return how long pages of the list take while the clients train."""
    cookie = log_in(place.base_url, place.key)
    queries = ["", "text=gsm8k", "metadata=sweep%3D7", "state=unloaded", f"base={BASE_NAME}", "text=nothing-has-this"]
    times = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=place.base_url, headers={"Cookie": cookie}, timeout=_TIMEOUT) as client,
    ):
        training = pool.submit(place.train, seconds)
        next_page = "/ui/runs"
        for number in range(_REQUESTS):
            is_next = number % 2 == 0
            path = next_page if is_next else f"/ui/runs?{queries[number // 2 % len(queries)]}"
            began = time.perf_counter()
            text = client.get(path).raise_for_status().text
            times.append(time.perf_counter() - began)
            if is_next:
                next_page = _older(text)
        training.result()
    return {"runs_page_p50_ms": 1e3 * statistics.median(times), "runs_page_p95_ms": 1e3 * _p95(times)}


def _older(text: str) -> str:
    begin = text.find('rel="next" href="')
    return "/ui/runs" if begin < 0 else text[begin:].split('"')[3].replace("&amp;", "&")


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return every figure."""
    model, data = folder / "tiny", folder / "data"
    write_tiny_model(model)
    # Of both clients and viewers; the default would end the oldest of so many sessions.
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={model}"]) as service:
        (key,) = make_tenants(data, ["many"])
        on_database(Settings(data_dir=data), lambda database: fill(database, "many", BASE_NAME, options.runs))
        with SdkClients(base_url=service.base_url, keys=[key] * _RUNS, base_model=BASE_NAME) as clients:
            newest = httpx.get(
                f"{service.base_url}/api/weft/v1/runs",
                params={"limit": _RUNS, "state": "ready"},
                headers={"X-API-Key": key},
                timeout=_TIMEOUT,
            ).json()["runs"]
            # The clients opened their runs in the order of their seeds.
            runs = [run["id"] for run in sorted(newest, key=lambda run: run["seed"])]
            place = Place(service.base_url, service.pid, key, runs, clients)
            figures = measure_throughput(place, viewers=options.viewers, turns=options.turns, seconds=options.seconds)
            figures |= measure_pixels(place, pages=options.pages, seconds=options.seconds)
            return figures | measure_list(place, seconds=options.seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=50, help="open run pages")
    parser.add_argument("--runs", type=int, default=10_000, help="runs in the list")
    parser.add_argument("--turns", type=int, default=6, help="turns with viewers, and as many without")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--pages", type=int, default=4, help="run pages in Chromium, at most 4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        print_figures(measure(Path(folder), options), digits=3)
