"""Memory that weft gives to vLLM servers: equal shares of what is left, beside the trainer and other servers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure, InvalidRequest
from engine.machine_memory import Gpu
from engine.sampling.vllm.memory_claims import MemoryNote, memory_claims, write_note
from engine.sampling.vllm.model_memory import ModelMemory, checkpoint_dtype
from engine.sampling.vllm.server_memory import (
    CPU_OVERHEAD,
    GPU_OVERHEAD,
    MemoryClaim,
    MemoryNeed,
    ServerMemory,
    batched_tokens,
    give_on_cpu,
    give_on_gpus,
    gpus_each,
    is_sized_by_operator,
)

GIB = 2**30
BIG = MemoryNeed(model=ModelMemory(weights=4 * GIB, adapters=0, token=2**17), context_length=8192, sequences=256)
GPUS = (Gpu(0, "a", 80 * GIB, 60 * GIB), Gpu(1, "b", 80 * GIB, 79 * GIB), Gpu(2, "c", 80 * GIB, 78 * GIB))


def claim(memory: ServerMemory, *, untaken: int | None = None, owner: int | None = None) -> MemoryClaim:
    return MemoryClaim(os.getpid() if owner is None else owner, memory, memory.given if untaken is None else untaken)


def cpu_shares(need: MemoryNeed, left: int, taken: float) -> list[int]:
    """Give every server its memory, of which it takes a part at once."""
    claims: list[MemoryClaim] = []
    for _ in range(need.servers):
        used = sum(one.memory.given - one.untaken for one in claims)
        memory = give_on_cpu(need, left - used, claims)
        claims.append(claim(memory, untaken=int(memory.given * (1 - taken))))
    return [one.memory.given for one in claims]


@pytest.mark.parametrize("taken", [0.0, 0.4, 1.0])
def test_servers_on_a_cpu_share_half_of_what_is_left_equally(taken: float) -> None:
    shares = cpu_shares(replace(BIG, servers=4), 64 * GIB, taken)
    assert shares == pytest.approx([8 * GIB] * 4, rel=1e-6)


def test_a_server_takes_no_more_than_every_sequence_needs() -> None:
    small = replace(BIG, model=ModelMemory(GIB, GIB, 2**10), context_length=256, sequences=64)
    memory = give_on_cpu(small, 64 * GIB, [])
    assert memory.kv_cache == (256 + 256) * 64 * 2**10
    assert memory.given == CPU_OVERHEAD + 2 * GIB + memory.kv_cache
    assert memory.arguments() == ["--kv-cache-memory-bytes", str(memory.kv_cache)]
    assert memory.variables() == {}


def test_one_whole_context_fits_beyond_the_share_while_it_is_left() -> None:
    needed = CPU_OVERHEAD + 4 * GIB + BIG.context_bytes
    assert give_on_cpu(BIG, needed, []).given == needed
    with pytest.raises(EngineFailure, match=r"WEFT_VLLM_CONTEXT_LENGTH to at most \d+") as refused:
        give_on_cpu(BIG, needed - GIB // 2, [])
    length = int(refused.value.message.partition("at most ")[2].partition(",")[0])
    give_on_cpu(replace(BIG, context_length=length), needed - GIB // 2, [])
    with pytest.raises(EngineFailure, match=": free memory"):
        give_on_cpu(BIG, GIB, [])


def test_adapters_in_a_hosts_memory_count_on_a_cpu_and_not_on_a_gpu() -> None:
    needed = CPU_OVERHEAD + 4 * GIB + BIG.context_bytes
    crowded = replace(BIG, resident=12 * GIB)
    with pytest.raises(EngineFailure):
        give_on_cpu(crowded, needed + 11 * GIB, [])
    assert give_on_cpu(crowded, needed + 12 * GIB, []).given == needed + 12 * GIB
    assert give_on_gpus(crowded, GPUS, []) == give_on_gpus(BIG, GPUS, [])


def test_memory_promised_to_another_process_is_left_to_it() -> None:
    other = claim(ServerMemory(("cpu",), 40 * GIB, kv_cache=GIB), untaken=30 * GIB, owner=1)
    assert give_on_cpu(BIG, 62 * GIB, [other]).given == give_on_cpu(BIG, 32 * GIB, []).given == 16 * GIB


def test_a_server_that_starts_again_gets_what_it_had() -> None:
    two = replace(BIG, servers=2)
    first = give_on_cpu(two, 64 * GIB, [])
    second = give_on_cpu(two, 64 * GIB, [claim(first)])
    assert give_on_cpu(two, 64 * GIB, [claim(second)]).given == first.given


def test_servers_go_to_gpus_without_the_trainer_first_and_leave_it_a_half() -> None:
    claims: list[MemoryClaim] = []
    need = replace(BIG, servers=3)
    for _ in range(3):
        claims.append(claim(give_on_gpus(need, GPUS, claims)))
    assert [one.memory.devices for one in claims] == [("b",), ("c",), ("a",)]
    assert [one.memory.given / GIB for one in claims] == pytest.approx([79 * 0.9, 78 * 0.9, 60 * 0.5])
    cache = 30 * GIB - GPU_OVERHEAD - 4 * GIB
    sizes = ["--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", "0.3750"]
    assert claims[2].memory.arguments() == sizes
    assert str(claims[2].memory) == "30.00 GiB on GPU a, 23.00 GiB of them for keys and values"
    assert claims[2].memory.variables() == {"CUDA_VISIBLE_DEVICES": "a"}


def test_servers_on_the_trainers_only_gpu_share_half_of_it_equally() -> None:
    need, only = replace(BIG, servers=2), GPUS[:1]
    first = claim(give_on_gpus(need, only, []))
    # vLLM takes a GPU's memory at its start: then the driver tells it, and nothing is left to be taken.
    is_up = [replace(only[0], free=only[0].free - first.memory.given)], [replace(first, untaken=0)]
    for gpus, claims in ((only, [first]), is_up):
        assert give_on_gpus(need, gpus, claims).given == first.memory.given == 15 * GIB


def test_a_server_over_several_gpus_gets_the_share_of_the_smallest() -> None:
    memory = give_on_gpus(replace(BIG, gpus_each=2), GPUS, [])
    assert (memory.devices, memory.given) == (("b", "c"), int(78 * GIB * 0.9))
    with pytest.raises(InvalidRequest, match="needs 4 GPUs, and 3 are visible"):
        give_on_gpus(replace(BIG, gpus_each=4), GPUS, [])
    full = [replace(gpu, free=2 * GIB) for gpu in GPUS]
    # What others hold may come back; a card that is too small stays so.
    with pytest.raises(EngineFailure, match="WEFT_VLLM_MEMORY_SHARE"):
        give_on_gpus(BIG, full, [])
    with pytest.raises(InvalidRequest, match="WEFT_VLLM_MEMORY_SHARE"):
        give_on_gpus(BIG, [replace(gpu, total=4 * GIB, free=4 * GIB) for gpu in GPUS], [])


def beside_a_trainer(free: float, **changes: Any) -> tuple[MemoryNeed, list[Gpu]]:
    """A server that needs 27.4 GiB for one context, and its GPU."""
    weights = int(27.4 * GIB) - GPU_OVERHEAD - BIG.context_bytes
    need = replace(BIG, model=replace(BIG.model, weights=weights), **changes)
    return need, [replace(GPUS[0], free=int(free))]


def test_one_whole_context_fits_beyond_the_share_of_a_gpu_while_it_is_left() -> None:
    assert give_on_gpus(*beside_a_trainer(58e9), []).given == int(27.4 * GIB)
    assert give_on_gpus(*beside_a_trainer(27.4 * GIB / 0.9 + 2), []).given == int(27.4 * GIB)
    with pytest.raises(EngineFailure, match=r"needs 27\.4 GiB"):
        give_on_gpus(*beside_a_trainer(30 * GIB), [])


def test_a_server_that_starts_again_gets_what_it_had_although_the_trainer_has_grown() -> None:
    had = give_on_gpus(*beside_a_trainer(68e9), [])
    assert had.given / GIB == pytest.approx(31.7, abs=0.1)
    # With the memory of CUDA itself, which an ended server gives back, too.
    assert give_on_gpus(*beside_a_trainer(had.given + GIB, had=had), []).given == had.given
    # A little less where the trainer has a little of it.
    assert give_on_gpus(*beside_a_trainer(had.given, had=had), []).given == had.given - GIB // 2
    with pytest.raises(EngineFailure, match=r"needs 27\.4 GiB"):
        give_on_gpus(*beside_a_trainer(27 * GIB, had=had), [])


def test_a_server_that_starts_again_beside_another_trainer_takes_no_more_than_its_share_there() -> None:
    """Another server was given its GPU meanwhile. Its fellow, which had the trainer's GPU, gets that memory again."""
    need, gpus = replace(BIG, servers=2), list(GPUS[:2])
    had = give_on_gpus(need, gpus, [])
    assert (had.devices, had.given) == (("b",), int(79 * GIB * 0.9))
    taken = claim(ServerMemory(("b",), 70 * GIB, GIB, 0.875), untaken=0)
    full = [gpus[0], replace(gpus[1], free=9 * GIB)]
    again = give_on_gpus(replace(need, had=had), full, [taken])
    assert (again.devices, again.given) == (("a",), 30 * GIB)
    fellow = ServerMemory(("a",), 40 * GIB, GIB, 0.5)
    assert give_on_gpus(replace(need, had=fellow), full, [taken]).given == 40 * GIB


def test_a_server_beyond_its_share_leaves_its_neighbours_theirs() -> None:
    whole = int(27.4 * GIB)
    need, gpus = beside_a_trainer(60 * GIB, servers=2)
    first = claim(give_on_gpus(need, gpus, []))
    # Promised to the first one, and not yet taken: the second one's whole context is not left.
    assert first.memory.given == whole
    with pytest.raises(EngineFailure, match=r"needs 27\.4 GiB"):
        give_on_gpus(need, [replace(gpus[0], free=57 * GIB)], [first])
    # Neither a wish nor a whole context takes the share of a server to come: 10 GiB of 40.
    again, fewer = beside_a_trainer(40 * GIB, servers=2, had=ServerMemory(("a",), 36 * GIB, GIB, 0.45))
    with_share = give_on_gpus(again, fewer, [])
    assert with_share.given == 40 * GIB - GIB // 2 - 10 * GIB
    small = replace(need, model=replace(need.model, weights=GIB))
    assert give_on_gpus(small, fewer, [claim(with_share)]).given >= 9 * GIB
    # A running neighbour holds its own memory already.
    running = claim(ServerMemory(("a",), 10 * GIB, GIB, 0.1), untaken=0)
    assert give_on_gpus(again, [replace(fewer[0], free=40 * GIB)], [running]).given == 36 * GIB


def test_without_a_trainer_beside_a_server_takes_most_of_the_first_gpu() -> None:
    assert give_on_gpus(replace(BIG, trainer_gpu=None), GPUS[:1], []).given == int(60 * GIB * 0.9)


@pytest.mark.parametrize(
    ("extra", "environment", "is_own"),
    [
        (["--kv-cache-memory-bytes", "1"], {}, True),
        (["--gpu-memory-utilization=0.5"], {}, True),
        (["--gpu_memory_utilization", "0.5"], {}, True),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "4"}, True),
        (["--enforce-eager"], {"VLLM_CPU_KVCACHE_SPACE": ""}, False),
    ],
)
def test_sizes_of_the_operator_win(extra: Sequence[str], environment: dict[str, str], is_own: bool) -> None:
    assert is_sized_by_operator(extra, environment) is is_own


def test_gpus_of_a_server_are_counted_from_its_arguments() -> None:
    assert gpus_each(["--enforce-eager"]) == 1
    assert gpus_each(["--tensor-parallel-size=2", "-pp", "3"]) == 6
    assert gpus_each(["--tensor_parallel_size", "2", "--pipeline_parallel_size=3"]) == 6


@pytest.mark.parametrize(("written", "tokens"), [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("512", 512)])
def test_numbers_are_read_as_vllm_reads_them(written: str, tokens: int) -> None:
    assert batched_tokens(["--max_num_batched_tokens", written]) == tokens


def test_a_claim_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = ServerMemory(("cpu",), 10**15, kv_cache=GIB)
    # As a server it leads a group of its own; the leader of this process's group may have ended.
    waiting = [sys.executable, "-c", "print('ready', flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(waiting, stdin=pipe, stdout=pipe, start_new_session=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        notes = {"own": (os.getpid(), server.pid), "gone": (os.getpid(), 2**22 - 1), "again": (1, 0)}
        for name, (owner, group) in notes.items():
            folder = tmp_path / f"weft-vllm-{name}"
            folder.mkdir()
            write_note(folder, MemoryNote(owner, memory, group))
        # The number of a process that has ended is another one's by now.
        again = tmp_path / "weft-vllm-again" / "memory.json"
        again.write_text(again.read_text().replace('"began":"', '"began":"1'))
        (only,) = memory_claims()
        assert server.stdin is not None
        server.stdin.write(b"\n")
    assert only.memory == memory
    # The server's group has some memory.
    assert 0 < only.untaken < memory.given
    assert list(memory_claims()) == []


def test_a_base_is_reckoned_from_its_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    memory = ModelMemory.read(tiny_model_dir, dtype="float32", max_rank=8, adapters=2)
    # 4 layers, 2 key-value heads of 32, keys and values, 4 bytes.
    assert memory.token == 4 * 2 * 32 * 2 * 4
    assert memory.weights == pytest.approx(sum(file.stat().st_size for file in tiny_model_dir.glob("*.safetensors")))
    for copy in ("pytorch_model.bin", "consolidated.safetensors", "optimizer.pt"):
        (tmp_path / copy).write_bytes(b"0" * 4096)
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    again = ModelMemory.read(tmp_path, dtype="float32", max_rank=8, adapters=2)
    assert again == memory, "the same weights in another form count once"
    half = ModelMemory.read(tiny_model_dir, dtype="bfloat16", max_rank=8, adapters=2)
    assert (half.token, half.weights) == (memory.token // 2, memory.weights // 2)
    config = json.loads((tiny_model_dir / "config.json").read_text())
    for name, text in (
        ("torch_dtype", config | {"dtype": None, "torch_dtype": "bfloat16"}),
        ("none", {"hidden_size": 8}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(text))
    assert checkpoint_dtype(tiny_model_dir) == "float32"
    assert checkpoint_dtype(tmp_path / "torch_dtype") == "bfloat16"
    assert ModelMemory.read(tmp_path / "none", dtype="float32", max_rank=8, adapters=2).token is None


def test_a_base_whose_config_leaves_sizes_out_is_reckoned_by_its_class(tmp_path: Path) -> None:
    """Gemma 3 as it is published gives no heads. A server without a token's memory has no bound for its cells."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    memory = ModelMemory.read(tmp_path, dtype="bfloat16", max_rank=8, adapters=2)
    # 34 layers, of which 29 slide and are cached as 30; 4 key-value heads of 256, keys and values, 2 bytes.
    assert memory.token == 35 * 4 * 256 * 2 * 2
    attention, perceptron = 2 * (2560 + 8 * 256) + 2 * (2560 + 4 * 256), 3 * (2560 + 10240)
    assert memory.adapters == (34 * (attention + perceptron) + 2560 + 262_208) * 8 * 2 * 2
