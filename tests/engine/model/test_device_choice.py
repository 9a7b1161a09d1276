"""Device of a base that is left to weft, on machines with and without a GPU, which are made up."""

import logging
from pathlib import Path

import pytest
import torch

from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.model.device_choice import choose_device


@pytest.mark.parametrize(
    ("has_cuda", "has_gpu", "device", "is_warned"),
    [(True, True, "cuda", False), (False, False, "cpu", False), (False, True, "cpu", True)],
)
def test_a_gpu_that_torch_cannot_use_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    has_cuda: bool,
    has_gpu: bool,
    device: str,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    if has_gpu:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
    assert choose_device(tmp_path) == device
    assert ("cannot compute on it" in caplog.text) is is_warned


def test_the_device_of_a_base_is_logged_at_its_load(tiny_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="engine.model.base")
    BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None), device="cpu")
    assert [record.message for record in caplog.records] == ["base weft/tiny is on cpu, of float32"]
