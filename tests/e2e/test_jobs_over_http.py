"""Jobs over HTTP: followed, cancelled, each tenant's own, and ended by no death of the service."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from testing.service_process import ServiceProcess
from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.repeating_proxy import RepeatingProxy
from tests.e2e.running_samples import until

PATIENCE_SECONDS = 600.0
SAVE = """
import sys, tinker
from tests.e2e.sdk_end import end
client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
trainer = client.create_lora_training_client(sys.argv[3], rank=4, seed=1).result()
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
trainer.forward_backward([datum], "cross_entropy").result()
trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
end(trainer.save_state("kept").result().path)
"""


def saved(url: str, key: str) -> str:
    """Train with the SDK and return the path of a checkpoint."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE, url, key, BASE_NAME], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return str(json.loads(done.stdout.strip().splitlines()[-1]))


def client(url: str, key: str) -> httpx.Client:
    """A client of weft's own endpoints."""
    return httpx.Client(base_url=f"{url}/api/weft/v1", headers={"X-API-Key": key}, timeout=30)


def ended(http: httpx.Client, job: str) -> dict[str, Any]:
    """Ask until the job has ended."""
    until = monotonic() + PATIENCE_SECONDS
    while monotonic() < until:
        found: dict[str, Any] = http.get(f"/jobs/{job}").raise_for_status().json()
        if found["finished_at"] is not None:
            return found
        sleep(0.1)
    pytest.fail(f"the job has not ended: {found}")


def packed(folder: Path) -> bytes:
    """A tar of a checkpoint's folder."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(folder, "adapter")
    return content.getvalue()


def test_a_merge_is_a_job_of_its_tenants(service: Service) -> None:
    path = saved(service.base_url, service.key)
    with client(service.base_url, service.key) as mine, client(service.base_url, service.other_key) as theirs:
        asked = {"path": path, "name": "merged", "ttl_seconds": 3600}
        assert theirs.post("/merges", json=asked).status_code == 404
        begun = mine.post("/merges", json=asked)
        assert begun.status_code == 202
        job = begun.json()["id"]
        for answer in (theirs.get(f"/jobs/{job}"), theirs.delete(f"/jobs/{job}")):
            assert answer.status_code == 404
        assert job not in theirs.get("/jobs").text
        done = ended(mine, job)
        run = path.removeprefix("tinker://").partition("/")[0]
        assert (done["state"], done["path"], done["error"]) == ("done", f"tinker://{run}/external_weights/merged", None)
        assert done["done_bytes"] == done["total_bytes"] > 0
        assert mine.get("/jobs").json()["jobs"][0]["id"] == job
        assert mine.delete(f"/jobs/{job}").json()["state"] == "done"
        again = ended(mine, mine.post("/merges", json=asked).json()["id"])
        assert (again["state"], again["error"]["code"]) == ("failed", "invalid_request")
        for wrong, says in (
            ({"path": done["path"]}, "external"),
            ({"name": "a/b"}, "name"),
            ({"dtype": "int4"}, "dtype"),
        ):
            refused = mine.post("/merges", json={**asked, **wrong})
            assert refused.status_code == 400
            assert says in refused.text
    address = f"{service.base_url}/api/v1/training_runs/{run}/checkpoints/external_weights/merged/external_weights_urls"
    urls = httpx.get(address, headers={"X-API-Key": service.key}, timeout=40).raise_for_status().json()["urls"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= urls.keys()
    assert httpx.get(address, headers={"X-API-Key": service.other_key}, timeout=40).status_code == 404
    content = httpx.get(urls["model.safetensors"], timeout=40).content
    target = service.data.parent / "merged.safetensors"
    target.write_bytes(content)
    merged, base = load_file(target), load_file(service.model / "model.safetensors")
    assert merged.keys() == base.keys()
    assert any(not torch.equal(merged[name], base[name]) for name in base)


def sent_until_answered(http: httpx.Client, endpoint: str, **request: Any) -> httpx.Response:
    """POST again and again until an answer comes, as a client does whose connection breaks."""
    for _ in range(3):
        try:
            return http.post(endpoint, **request)
        except httpx.TransportError:
            continue
    pytest.fail("no answer")


def test_a_repeat_after_a_lost_answer_starts_no_second_job(service: Service) -> None:
    """Two tenants use the same keys, each for jobs of its own."""
    path = saved(service.base_url, service.key)
    key = make_tenant(service.data, "repeating")
    kept = max((service.data / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)
    archive, wanted = packed(kept), {"base_model": BASE_NAME, "name": "sent"}
    merge = {"path": path, "name": "once"}
    with (
        RepeatingProxy(service.base_url, loses=("/merges", "/imports")) as proxy,
        client(proxy.base_url, service.key) as mine,
        client(proxy.base_url, key) as theirs,
    ):
        before = {job["id"] for job in mine.get("/jobs").json()["jobs"]}
        named = {"headers": {"Idempotency-Key": "merge-1"}}
        merged = sent_until_answered(mine, "/merges", json=merge, **named).json()
        assert ended(mine, merged["id"])["state"] == "done"
        # Also once the job has ended.
        assert sent_until_answered(mine, "/merges", json=merge, **named).json()["id"] == merged["id"]
        for http in (mine, theirs):
            named = {"headers": {"Idempotency-Key": "import-1"}}
            done = sent_until_answered(http, "/imports", params=wanted, content=archive, **named).json()
            assert ended(http, done["id"])["state"] == "done"
            again = sent_until_answered(http, "/imports", params=wanted, content=archive, **named)
            assert again.json()["id"] == done["id"]
            other = sent_until_answered(http, "/imports", params={**wanted, "name": "b"}, content=archive, **named)
            assert (other.status_code, other.json()["code"]) == (400, "sequence_conflict")
        for asked, named in ((merge, "import-1"), ({**merge, "name": "twice"}, "merge-1")):
            other = sent_until_answered(mine, "/merges", json=asked, headers={"Idempotency-Key": named})
            assert (other.status_code, other.json()["code"]) == (400, "sequence_conflict")
        assert sent_until_answered(mine, "/merges", json=merge, headers={"Idempotency-Key": "a b"}).status_code == 400
        assert len({job["id"] for job in mine.get("/jobs").json()["jobs"]} - before) == 2
        assert len(theirs.get("/jobs").json()["jobs"]) == 1
        assert proxy.lost >= 5
    assert list((service.data / "imports").iterdir()) == []


def test_a_killed_service_goes_on_with_its_jobs(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The service dies as soon as it has taken the jobs in; the next one merges and imports, and leaves nothing half-written."""
    data, bases = tmp_path / "data", [f"{BASE_NAME}={tiny_model_dir}"]
    with ServiceProcess(data=data, base_models=bases) as process:
        key = make_tenant(data, "first")
        path = saved(process.base_url, key)
        (kept,) = (data / "checkpoints").iterdir()
        with client(process.base_url, key) as http:
            jobs = [
                http.post("/merges", json={"path": path, "name": f"m{n}"}).raise_for_status().json()["id"]
                for n in (1, 2)
            ]
            sent = http.post("/imports", params={"base_model": BASE_NAME}, content=packed(kept))
            jobs.append(sent.raise_for_status().json()["id"])
        process.kill()
    old, young = data / "imports" / "old", data / "imports" / "young"
    for forsaken in (old, young):
        forsaken.mkdir()
    os.utime(old, (0, 0))
    with ServiceProcess(data=data, base_models=bases) as process, client(process.base_url, key) as http:
        done = [ended(http, job) for job in jobs]
        assert [one["state"] for one in done] == ["done", "done", "done"]
        assert len({one["path"] for one in done}) == 3
        until(lambda: not old.exists(), "what nobody writes to any more is gone")
    assert not [folder for folder in (data / "checkpoints").iterdir() if folder.name.startswith(".")]
    assert len(list((data / "checkpoints").iterdir())) == 4
    assert list((data / "imports").iterdir()) == [young], "somebody may be about to record it"
