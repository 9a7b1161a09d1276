"""Jobs on weights beside training in ``weft serve``: in a process of their own, which others do not feel and nobody leaves."""

from pathlib import Path

import psutil

from testing.held_file import HeldFile
from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, make_tenant
from tests.e2e.test_jobs_over_http import PATIENCE_SECONDS, client, ended, saved


def job_process(service: ServiceProcess) -> psutil.Process:
    """The one process of the service's jobs."""
    children = psutil.Process(service.pid).children(recursive=True)
    (found,) = [child for child in children if "workers.job_server" in child.cmdline()]
    return found


def held_checkpoint(data: Path) -> HeldFile:
    """Hold whoever reads the newest checkpoint."""
    newest = max((data / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)
    return HeldFile(newest / "adapter_config.json")


def test_a_job_computes_beside_the_process_that_trains_and_outlives_its_own(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The job's process stands still while another tenant trains, and is killed then: the job is tried again and done."""
    data = tmp_path / "data"
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"]) as service:
        key, other = make_tenant(data, "first"), make_tenant(data, "second")
        path = saved(service.base_url, key)
        held = held_checkpoint(data)
        with client(service.base_url, key) as http:
            job = http.post("/merges", json={"path": path, "name": "merged"}).raise_for_status().json()["id"]
            held.reached()
            working = job_process(service)
            working.suspend()
            saved(service.base_url, other)
            assert http.get(f"/jobs/{job}").json()["state"] == "running"
            held.mend()
            working.kill()
            done = ended(http, job)
            assert (done["state"], done["attempts"], done["error"]) == ("done", 2, None)
            assert job_process(service).pid != working.pid


def test_no_process_of_a_job_outlives_its_service(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The service is killed with a job in hand, then one ends in order with it. The third has it done."""
    data, bases = tmp_path / "data", [f"{BASE_NAME}={tiny_model_dir}"]
    with ServiceProcess(data=data, base_models=bases) as service:
        key = make_tenant(data, "first")
        path = saved(service.base_url, key)
        held = held_checkpoint(data)
        with client(service.base_url, key) as http:
            job = http.post("/merges", json={"path": path, "name": "merged"}).raise_for_status().json()["id"]
        held.reached()
        working = job_process(service)
        service.kill()
        working.wait(PATIENCE_SECONDS)
    with ServiceProcess(data=data, base_models=bases) as service:
        held.reached()
        working = job_process(service)
        assert service.stop() == 0
        assert not working.is_running()
    held.mend()
    with ServiceProcess(data=data, base_models=bases) as service, client(service.base_url, key) as http:
        done = ended(http, job)
    # The killed service's attempt counts, and not that of the one that ended in order.
    assert (done["state"], done["attempts"]) == ("done", 2)
    assert len(list((data / "checkpoints").iterdir())) == 2
