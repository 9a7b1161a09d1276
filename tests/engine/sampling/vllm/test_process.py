"""Starting, watching and ending a server process, with a stand-in that is up in no time."""

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from contracts.errors import EngineFailure, InvalidRequest
from engine.machine_memory import Gpu
from engine.sampling.vllm.cores import one_process_variables
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.process import VllmProcess, VllmProcessSettings
from engine.sampling.vllm.server_memory import MemoryNeed

# A server with a worker, like vLLM's. It writes its worker's and its own process ids, and a long line for each request;
# ``stubborn`` ignores SIGTERM, ``full`` finds too little memory.
STAND_IN = """
import http.server, os, signal, socketserver, subprocess, sys
mode, path = sys.argv[1], sys.argv[sys.argv.index("--uds") + 1]
if mode == "broken":
    sys.exit("no such model")
if mode == "full":
    sys.exit(f"No available memory for the cache blocks, sizes: {sys.argv.count('--kv-cache-memory-bytes')}")
ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
worker = subprocess.Popen([sys.executable, "-c", ignore + "signal.pause()"])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, "x" * 1000, flush=True)
        self.send_response(503 if mode == "sick" else 200)
        self.end_headers()
    def address_string(self):
        return "unix"
print("pids", os.getpid(), worker.pid, os.environ.get("VLLM_API_KEY"), os.environ.get("PYTHONPATH"), flush=True)
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""
GONE_S = 20.0
# Not from tests.conftest, which loads torch: a test starts a process that imports this module.
ROOT = Path(__file__).parents[4]


def settings_of(folder: Path, mode: str) -> VllmProcessSettings:
    return VllmProcessSettings(
        command=(sys.executable, "-c", STAND_IN, mode),
        model=folder,
        served_model="base",
        log=folder / "server.log",
        context_length=128,
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=4,
        on_cpu=False,
        api_key="secret",
        start_deadline_s=1.0 if mode == "sick" else 30.0,
        stop_grace_s=0.5,
    )


def pids(folder: Path) -> list[int]:
    """Process ids of the server and its worker, from the log."""
    line = next(line for line in (folder / "server.log").read_text().splitlines() if line.startswith("pids"))
    assert line.endswith("secret None")
    return [int(word) for word in line.split()[1:3]]


def processes(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids(folder) if psutil.pid_exists(pid)]


def rights(folder: Path) -> int | None:
    """Permission bits of a folder; None if it is not there."""
    return stat.S_IMODE(folder.stat().st_mode) if folder.exists() else None


def private_folders(folder: Path) -> list[Path]:
    """Servers' private folders in the folder for temporary files."""
    return list(folder.glob("weft-vllm-*/"))


def assert_gone(found: list[psutil.Process], *, reaped: bool = True) -> None:
    """Within 20 s; without the guard to reap them, some may stay as zombies."""
    _, alive = psutil.wait_procs(found, timeout=GONE_S if reaped else 2.0)
    assert all(not reaped and process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("mode", ["good", "stubborn"])
async def test_stop_leaves_nothing(tmp_path: Path, mode: str) -> None:
    process = VllmProcess(settings_of(tmp_path, mode))
    await process.start()
    found = processes(tmp_path)
    assert not process.died.is_set()
    await process.stop()
    await process.stop()
    assert process.died.is_set()
    assert_gone(found)


async def test_its_output_is_bounded_and_another_servers_stays(tmp_path: Path) -> None:
    """A server writes a line for each adapter that it loads."""
    most, log, aside = 20_000, tmp_path / "server.log", tmp_path / "server.log.1"
    other = tmp_path / "other.log"
    other.write_text("x" * 10 * most)
    for name, days in (("old.log", 366), ("old.log.1", 366), ("young.log", 364)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, times=(time.time() - days * 86_400,) * 2)
    settings = replace(settings_of(tmp_path, "good"), log_bytes=most, log_look_s=0.01)
    async with VllmProcess(settings) as process, asyncio.timeout(GONE_S):
        transport = httpx.AsyncHTTPTransport(uds=process.base_url.removeprefix("unix://"))
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as http:
            # Cut after the copy is whole.
            while not aside.exists() or log.stat().st_size >= most:
                await http.get("/before")
            while "/after" not in log.read_text():
                await http.get("/after")
            assert log.stat().st_size < 2 * most
            assert aside.read_text().startswith("pids")
    assert other.stat().st_size == 10 * most
    assert {name for name in os.listdir(tmp_path) if ".log" in name} == {log.name, aside.name, other.name, "young.log"}


async def test_it_has_a_process_group_but_no_session_of_its_own(tmp_path: Path) -> None:
    """Linux may share the cores between sessions: a busy server in one of its own starves weft."""
    async with VllmProcess(settings_of(tmp_path, "good")) as process:
        for found in processes(tmp_path):
            assert os.getsid(found.pid) == os.getsid(0)
            assert os.getpgid(found.pid) == process.group != os.getpgid(0)


async def test_nobody_but_wefts_user_reaches_it(tmp_path: Path) -> None:
    """No port, and a socket in a folder that others may not enter, which is gone with the server."""
    async with VllmProcess(settings_of(tmp_path, "good")) as process:
        socket = Path(process.base_url.removeprefix("unix://"))
        assert rights(socket.parent) == 0o700
        listening = [one for found in processes(tmp_path) for one in found.net_connections("inet")]
        assert listening == []
    assert rights(socket.parent) is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_server_on_a_cpu_must_not_split_prompts_and_one_elsewhere_may(tmp_path: Path, on_cpu: bool) -> None:
    settings = replace(settings_of(tmp_path, "good"), on_cpu=on_cpu)
    assert ("--no-enable-chunked-prefill" in settings.arguments(Path("s"))) is on_cpu


def test_its_log_has_no_line_for_each_request(tmp_path: Path) -> None:
    assert "--disable-uvicorn-access-log" in settings_of(tmp_path, "good").arguments(Path("s"))


def test_wefts_own_environment_wins_over_what_a_server_on_a_cpu_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    variables = replace(settings_of(tmp_path, "good"), on_cpu=True).variables()
    assert (variables["VLLM_ENABLE_V1_MULTIPROCESSING"], variables["OMP_NUM_THREADS"]) == ("1", "7")


def test_a_server_that_is_not_tuned_gets_none_of_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    settings = replace(settings_of(tmp_path, "good"), on_cpu=True)
    added = settings.variables().keys() - replace(settings, tune_cpu=False).variables().keys()
    assert added == one_process_variables().keys()


@pytest.mark.parametrize("victim", ["server", "guard", "group"])
async def test_a_death_is_noticed_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    async with VllmProcess(settings_of(tmp_path, "good")) as process:
        found = processes(tmp_path)
        guard = found[0].parent()
        assert guard is not None
        kill: dict[str, Callable[[], None]] = {"server": found[0].kill, "guard": guard.kill, "group": process.kill}
        kill[victim]()
        async with asyncio.timeout(GONE_S):
            await process.died.wait()
        assert process.exit_code == (-signal.SIGKILL if victim == "guard" else 128 + signal.SIGKILL)
        assert_gone(found, reaped=victim != "guard")


@pytest.mark.parametrize(("mode", "message"), [("broken", r"ended with status 1(.|\n)*no such model"), ("sick", "1 s")])
async def test_one_that_does_not_come_up(tmp_path: Path, mode: str, message: str) -> None:
    process = VllmProcess(settings_of(tmp_path, mode))
    with pytest.raises(EngineFailure, match=message):
        await process.start()
    assert process.died.is_set()
    # On a busy machine its time may end before it has begun to print.
    if mode == "sick" and "pids" in (tmp_path / "server.log").read_text():
        assert_gone(processes(tmp_path))


@pytest.mark.parametrize(
    ("extra", "way"),
    [((), "WEFT_VLLM_MEMORY_SHARE"), (("--kv-cache-memory-bytes", "9"), "ask for more in WEFT_VLLM_ARGUMENTS")],
)
async def test_a_size_of_the_operators_own_is_the_only_one_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], way: str
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    need = MemoryNeed(model=ModelMemory(weights=0, adapters=0, token=1), context_length=128, sequences=2)
    settings = replace(settings_of(tmp_path, "full"), on_cpu=True, need=need, extra=extra)
    with pytest.raises(EngineFailure, match=f"leave no memory for keys and values: .*{way}"):
        await VllmProcess(settings).start()
    assert "sizes: 1" in (tmp_path / "server.log").read_text()


async def test_beside_a_gpu_of_unknown_memory_a_server_needs_a_size_of_the_operators_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> list[Gpu]:
        raise InvalidRequest("set --gpu-memory-utilization in WEFT_VLLM_ARGUMENTS")

    monkeypatch.setattr("engine.sampling.vllm.memory_claims.visible_gpus", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    need = MemoryNeed(model=ModelMemory(weights=0, adapters=0, token=1), context_length=128, sequences=2)
    settings = replace(settings_of(tmp_path, "good"), need=need)
    with pytest.raises(InvalidRequest, match="--gpu-memory-utilization"):
        await VllmProcess(settings).start()
    assert private_folders(tmp_path) == []
    assert not (tmp_path / "server.log").exists(), "no vLLM was started"
    async with VllmProcess(replace(settings, extra=("--gpu-memory-utilization", "0.45"))) as process:
        assert process.memory is None


@pytest.mark.parametrize("mode", ["good", "stubborn"])
async def test_it_does_not_outlive_weft(tmp_path: Path, mode: str) -> None:
    """A process that starts a server and is killed."""
    program = (
        "import asyncio, pathlib, signal\n"
        "from tests.engine.sampling.vllm.test_process import settings_of\n"
        "from engine.sampling.vllm.process import VllmProcess\n"
        "async def main():\n"
        f"    process = VllmProcess(settings_of(pathlib.Path({str(tmp_path)!r}), {mode!r}))\n"
        "    await process.start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    weft = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}
    )
    assert weft.stdout is not None
    async with asyncio.timeout(GONE_S):
        assert await weft.stdout.readline() == b"up\n"
    found = processes(tmp_path)
    weft.kill()
    await weft.wait()
    assert_gone(found)
