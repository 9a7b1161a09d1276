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
_OPENING_SECONDS = 8.0
"""Time of a turn in which viewers have opened their streams, seen their last point and gone."""


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
class Window:
    """Part of a training. Times are the system's monotonic clock's; ``cpu_s`` is processor time of the service."""

    begin: float
    end: float
    cpu_s: float

    def steps(self, ends: Sequence[float]) -> int:
        """Return how many steps ended in it."""
        return sum(self.begin <= end < self.end for end in ends)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one training, in pairs: nobody watched in ``alone``, and ``viewers`` did in ``beside``."""

    alone: list[Window] = field(default_factory=list)
    beside: list[Window] = field(default_factory=list)
    viewers: list[Viewer] = field(default_factory=list)


async def _window(place: Place, seconds: float) -> Window:
    cpu, begin = cpu_seconds(place.pid), time.monotonic()
    await asyncio.sleep(seconds)
    return Window(begin, time.monotonic(), cpu_seconds(place.pid) - cpu)


async def _watched(place: Place, seconds: float, cookies: list[str], watching: list[Viewer]) -> Window:
    """Return a window beside viewers, once each of them has seen what it was to see."""
    async with Viewers(place.base_url, cookies, watching):
        window = await _window(place, seconds)
        wanted = {run: await asyncio.to_thread(place.steps_of, run) for run in place.runs}
        async with asyncio.timeout(_TIMEOUT):
            for one in watching:
                await one.until(wanted[one.run])
    return window


async def _look_on(place: Place, *, viewers: int, turns: int, seconds: float, cookies: list[str]) -> Windows:
    """Watch a training that goes on, and watch it not, in turns; each is first in half of them."""
    found = Windows()
    for turn in range(turns):
        if turn % 2 == 0:
            found.alone.append(await _window(place, seconds))
        begins = {run: await asyncio.to_thread(place.steps_of, run) for run in place.runs}
        watching = [Viewer(run, begins[run]) for run in (place.runs[number % _RUNS] for number in range(viewers))]
        found.beside.append(await _watched(place, seconds, cookies, watching))
        found.viewers.extend(watching)
        if turn % 2 == 1:
            found.alone.append(await _window(place, seconds))
    return found


def measure_throughput(place: Place, *, viewers: int, turns: int, seconds: float) -> dict[str, float]:
    """Return the ratio of the steps a second beside viewers to those without.

    One training goes on through all turns. Clients that begin anew fall into step with each other in another way, which
    changes how many of them share a pass, and so the speed, by more than viewers do.
    """
    cookies = place.cookies(viewers)
    place.train(seconds / 2)
    begins = {run: place.steps_of(run) for run in place.runs}
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(place.train, turns * (2 * seconds + _OPENING_SECONDS))
        found = asyncio.run(_look_on(place, viewers=viewers, turns=turns, seconds=seconds, cookies=cookies))
        report = training.result()
    ends = {run: [end for _, end in report.steps[number]] for number, run in enumerate(place.runs)}
    every = [end for one in ends.values() for end in one]
    last = min(one[-1] for one in ends.values())
    if found.beside[-1].end > last or found.alone[-1].end > last:
        raise RuntimeError("the training ended before the last turn did: opening the viewers took too long")
    late = [
        max(0.0, came - ends[one.run][step - begins[one.run] - 1])
        for one in found.viewers
        for step, came in zip(one.steps, one.came, strict=True)
        if step > begins[one.run]
    ]
    alone, beside = _summed(found.alone, every), _summed(found.beside, every)
    return {
        "throughput_ratio": beside.speed / alone.speed,
        "steps_per_s_alone": alone.speed,
        "steps_per_s_watched": beside.speed,
        "cpu_ratio": beside.cpu_ms / alone.cpu_ms,
        "cpu_ms_a_step_alone": alone.cpu_ms,
        "cpu_ms_a_step_watched": beside.cpu_ms,
        "point_to_viewer_p95_ms": 1e3 * _p95(late),
        "wrong_points": sum(one.wrong for one in found.viewers),
    }


@dataclass(frozen=True, slots=True)
class Summed:
    """Steps a second of several windows together, and the service's processor time for a step."""

    speed: float
    cpu_ms: float


def _summed(windows: Sequence[Window], ends: Sequence[float]) -> Summed:
    steps = sum(one.steps(ends) for one in windows)
    seconds = sum(one.end - one.begin for one in windows)
    return Summed(steps / seconds, 1e3 * sum(one.cpu_s for one in windows) / steps)


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
