"""Checks of adapter folders before vLLM loads them: what is damaged is final, and what is away is tried again."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from contracts.errors import InvalidRequest, Unavailable
from engine.sampling.replica import AdapterVersion
from engine.sampling.vllm.adapter_files import check_adapter


def written(folder: Path) -> AdapterVersion:
    """An adapter of rank 1."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1}))
    save_file({"base_model.model.q.lora_A.weight": np.ones((1, 2), np.float32)}, folder / "adapter_model.safetensors")
    return AdapterVersion(folder.name, folder)


def check(version: AdapterVersion) -> None:
    """Check for a replica of small adapters."""
    check_adapter(version, max_rank=8, head_adapters=False)


def test_an_adapter_whose_folder_is_away_is_tried_again_and_anothers_is_taken(tmp_path: Path) -> None:
    version, other = written(tmp_path / "away" / "one"), written(tmp_path / "there" / "two")
    check(version)
    gone = version.directory.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable):
        check(version)
    check(other)
    gone.rename(version.directory.parent)
    check(version)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_one_of_its_files_is_final(tmp_path: Path, file: str) -> None:
    version, other = written(tmp_path / "one"), written(tmp_path / "two")
    (version.directory / file).unlink()
    with pytest.raises(InvalidRequest, match="missing or damaged"):
        check(version)
    check(other)


def test_the_checks_load_no_torch() -> None:
    program = "import sys, engine.sampling.vllm.adapter_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
