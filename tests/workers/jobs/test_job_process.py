"""The process of the jobs' work: started by work, at a low priority, ended when it is idle or nobody is there to ask it."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from contracts.errors import InvalidRequest, Unavailable
from engine.model.skeleton import read_names
from testing.held_file import PATIENCE_SECONDS, HeldFile
from tests.conftest import ROOT
from workers import child_process
from workers.job_server import NICENESS
from workers.jobs.job_process import JobProcess
from workers.jobs.work import MergeWork

_HIGHEST_NICENESS = 19
ASKER = """
import asyncio, sys
from pathlib import Path
from engine.model.skeleton import read_names
from workers.jobs.job_process import JobProcess
from workers.jobs.work import MergeWork

async def ask():
    base, folder = map(Path, sys.argv[1:])
    process = JobProcess()
    await process.ready()
    print(process.pid, flush=True)
    work = MergeWork(base, read_names(base), folder / "adapter", folder / "new", folder / "old", None, 10**9)
    await process.do(work, lambda done, total: None)

asyncio.run(ask())
"""


def merge(base: Path, folder: Path) -> MergeWork:
    """A merge of an adapter that is not there."""
    return MergeWork(base, read_names(base), folder / "adapter", folder / "new", folder / "old", None, 10**9)


async def test_the_process_computes_at_a_low_priority_and_ends_when_it_is_idle(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Work that is refused ends nothing: the next is done by the same process, unless that was idle."""
    process = JobProcess(idle=0.0)
    await process.ready()
    assert process.pid is not None
    first = psutil.Process(process.pid)
    assert first.nice() == min(psutil.Process().nice() + NICENESS, _HIGHEST_NICENESS)
    with pytest.raises(InvalidRequest, match="missing or damaged"):
        await process.do(merge(tiny_model_dir, tmp_path), lambda done, total: None)
    await asyncio.to_thread(first.wait, PATIENCE_SECONDS)
    await process.ready()
    assert process.pid not in (None, first.pid)
    await process.close()
    assert process.pid is None


def test_the_process_ends_in_the_middle_of_its_work_with_who_asked_for_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The one who asks is killed, so nobody ends the process in order."""
    (tmp_path / "adapter").mkdir()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text("{}")
    held = HeldFile(config)
    command = [sys.executable, "-c", ASKER, str(tiny_model_dir), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as asker:
        assert asker.stdout is not None
        working = psutil.Process(int(asker.stdout.readline()))
        held.reached()
        assert working.is_running()
        asker.send_signal(signal.SIGKILL)
        working.wait(PATIENCE_SECONDS)
    held.mend()


async def test_a_process_that_does_not_start_is_no_fault_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    process = JobProcess()
    for program in ("/bin/false", "/no/such/program"):
        with monkeypatch.context() as patch:
            patch.setattr(child_process.sys, "executable", program)
            with pytest.raises(Unavailable, match="does not start"):
                await process.ready()
        assert process.pid is None


def test_the_process_loads_what_it_computes_with_alone() -> None:
    """No database, no HTTP, no models: they take seconds and memory, and a tenant's file is read in the same process."""
    loaded = "import sys, workers.jobs.computing; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT, check=True)
    names = set(done.stdout.split())
    assert {"torch", "safetensors"} <= names
    assert not names & {
        "transformers",
        "peft",
        "sqlalchemy",
        "fastapi",
        "celery",
        "redis",
        "store",
        "tenants",
        "ledger",
    }
