"""Imports and merges beside a running service, by command and over HTTP, and the SDK on what came in."""

import io
import json
import os
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from testing.operator_command import weft as operator
from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.test_jobs_over_http import client, ended

SCRIPT = Path(__file__).with_name("sdk_imported.py")
TOKENS = [84, 104, 101, 32, 99, 97, 116]
TOLERANCE = 1e-4
"""Tolerance of logprobs in fp32: the fused pass, PEFT and merged weights round differently."""


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """A model's logprobs of ``TOKENS``."""
    with torch.no_grad():
        scores = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return scores[range(len(TOKENS) - 1), TOKENS[1:]]


@pytest.fixture(scope="module")
def peft(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder that PEFT wrote, and the logprobs of base plus adapter in PEFT."""
    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float32)
        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        model: PeftModel = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        model.save_pretrained(folder)
    return folder, logprobs(model)


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as an operator does."""
    command = [sys.executable, "-m", "cli.main", "checkpoint", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check_computed(service: Service, paths: list[str], expected: torch.Tensor) -> None:
    """See that the SDK trains and samples the checkpoint of ``weights`` and that of ``sampler_weights``, their tenant's alone."""
    arguments = [service.base_url, service.key, service.other_key, *paths]
    finished = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-3000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    for found in (seen["computed"], seen["sampled"]):
        torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)
    assert (torch.tensor(seen["after"]) - expected).abs().max() > 0.01
    assert len(seen["sizes"]) == 2
    assert all(seen["sizes"])
    assert seen["foreign"] == "not found"


def archive(files: dict[str, bytes], *others: tarfile.TarInfo, form: str = "w:gz") -> bytes:
    """A tar of files, and of members without content."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=form) as tar:  # type: ignore[call-overload]
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        for other in others:
            tar.addfile(other)
    return content.getvalue()


def sent(service: Service, key: str, content: bytes, **wanted: Any) -> dict[str, Any]:
    """Send an archive, and return its job once it has ended."""
    with client(service.base_url, key) as http:
        begun = http.post("/imports", params={"base_model": BASE_NAME, **wanted}, content=content)
        assert begun.status_code == 202, begun.text
        return ended(http, begun.json()["id"])


def folders_of_checkpoints(service: Service) -> set[Path]:
    """Return the folders of the data folder but the snapshots, which come and go with the runs of other tests."""
    snapshots = service.data / "snapshots"
    found = {Path(folder) / name for folder, names, _ in os.walk(service.data) for name in names}
    return {path for path in found if not path.is_relative_to(snapshots)}


def test_an_imported_adapter_is_trained_sampled_and_merged(
    service: Service, peft: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """The adapter computes what it computed in PEFT: in the trainer, in the sampler and merged. No other tenant has it."""
    folder, expected = peft
    given = [
        str(folder),
        "--tenant",
        "first",
        "--base-model",
        f"{BASE_NAME}={service.model}",
        "--data",
        str(service.data),
    ]
    paths = []
    for more in ([], ["--sampler"]):
        done = weft("import", *given, "--name", "mine", *more)
        assert done.returncode == 0, done.stderr
        paths.append(done.stdout.strip())
    check_computed(service, paths, expected)
    done = weft("merge", paths[0], str(tmp_path / "merged"), "--base", str(service.model), "--data", str(service.data))
    assert done.returncode == 0, done.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logprobs(merged), expected, atol=TOLERANCE, rtol=0)
    log = json.loads(operator(service.data, "audit", "list", "--resource", "checkpoint", "--limit", "50", "--json"))
    mine = [one for one in reversed(log["items"]) if one["resource_id"] in paths and one["door"] == "cli"]
    told = [(one["action"], one["resource_id"], one["door"]) for one in mine]
    made = [("checkpoint_create", path, "cli") for path in paths]
    assert told == [*made, ("checkpoint_read", paths[0], "cli")]


def test_what_cannot_be_imported_leaves_nothing(
    service: Service, peft: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    folder, _ = peft
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    before = folders_of_checkpoints(service)
    base = ["--base-model", f"{BASE_NAME}={service.model}", "--data", str(service.data)]
    for source, tenant, says in (
        (tmp_path, "first", "is a pickle"),
        (folder, "nobody", "no tenant"),
    ):
        done = weft("import", str(source), "--tenant", tenant, *base)
        assert done.returncode == 1
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert not folders_of_checkpoints(service) - before


def test_an_adapter_that_its_tenant_sends_is_trained_and_sampled(
    service: Service, peft: tuple[Path, torch.Tensor]
) -> None:
    """The adapter computes what it computed in PEFT, and no other tenant has it."""
    folder, expected = peft
    files = {f"mine/{file.name}": file.read_bytes() for file in folder.iterdir() if file.is_file()}
    forms = (("weights", "w"), ("sampler_weights", "w:gz"))
    jobs = [
        sent(service, service.key, archive(files, form=form), name="sent", segment=segment) for segment, form in forms
    ]
    assert [(job["kind"], job["state"], job["error"]) for job in jobs] == [("import", "done", None)] * 2
    paths = [job["path"] for job in jobs]
    assert [path.partition("//")[2].partition("/")[2] for path in paths] == ["weights/sent", "sampler_weights/sent"]
    check_computed(service, paths, expected)
    assert list((service.data / "imports").iterdir()) == []
    with client(service.base_url, service.other_key) as theirs:
        assert jobs[0]["id"] not in theirs.get("/jobs").text


def test_a_hostile_archive_fails_its_job_and_nothing_else(service: Service, peft: tuple[Path, torch.Tensor]) -> None:
    folder, _ = peft
    config, weights = (folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    good = {config.name: config.read_bytes(), weights.name: weights.read_bytes()}
    link = tarfile.TarInfo("adapter_config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    before = {path.name for path in (service.data / "checkpoints").iterdir()}
    for content, says in (
        (b"", "cannot be read"),
        (b"no archive at all", "cannot be read"),
        (archive(good)[:-2000], "cannot be read"),
        (archive({config.name: good[config.name], "adapter_model.bin": b"\x80\x04"}), "is a pickle"),
        (archive({f"../../{config.name}": good[config.name]}), "leads out"),
        (archive({}, link), "link"),
        (archive({**good, config.name: b'{"r": 1000000, "lora_alpha": 8}'}), "r must be"),
        (archive({**good, weights.name: b"\xff" * 64}), "header"),
        (archive({**good, weights.name: good[weights.name][:-64]}), "not as large"),
    ):
        job = sent(service, service.key, content)
        assert (job["state"], job["path"], job["error"]["code"]) == ("failed", None, "invalid_request")
        assert says in job["error"]["message"]
    assert not {path.name for path in (service.data / "checkpoints").iterdir()} - before
    theirs = sent(service, service.other_key, archive(good), name="after")
    assert theirs["state"] == "done"
    assert list((service.data / "imports").iterdir()) == []
