"""Failures of vLLM 0.32 at its start, as its log has them, and the settings that weft names for them."""

import pytest

from engine.sampling.vllm.start_failures import explain_start_failure

FAILURES = {
    "WEFT_VLLM_MEMORY_SHARE": "ValueError: Available memory on node 0 (9.93/13.59 GiB) on startup is less than desired CPU "
    "memory utilization (0.92, 12.5 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls",
    "2.0 GiB are free": "ValueError: Free memory on device cuda:0 (2.0/79.1 GiB) on startup is less than desired GPU memory "
    "utilization (0.92, 72.77 GiB). Decrease GPU memory",
    "it wants 4.0 GiB": "ValueError: Available memory on node 0 (1.5/13.6 GiB) on kv cache allocation is less than requested "
    "memory for kv (4.0 GiB). Decrease --kv-cache-memory-bytes",
    "WEFT_VLLM_CONTEXT_LENGTH to at most 13056": "ValueError: To serve at least one request with the model's max seq len "
    "(40960), (4.38 GiB KV cache is needed, which is larger than the available KV cache memory (1.4 GiB). Based on the "
    "available memory, the estimated maximum model length is 13056. Try increasing",
    "WEFT_VLLM_CONTEXT_LENGTH to less than 40960": "ValueError: To serve at least one request with the model's max seq len "
    "(40960), (4.38 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Try increasing",
    "WEFT_MAX_RANK": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "tensor-parallel-size": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "/opt/none/bin/python: run `make vllm`": "FileNotFoundError: [Errno 2] No such file or directory: '/opt/none/bin/python'",
    "WEFT_VLLM_COMMAND": "python3: Error while finding module specification (ModuleNotFoundError: No module named 'vllm')",
    "--lora-turbo: correct WEFT_VLLM_ARGUMENTS": "api_server.py: error: unrecognized arguments: --lora-turbo",
    "NopeForCausalLM": "ValueError: Model architectures ['NopeForCausalLM'] are not supported for now.",
    "takes no adapters on MambaForCausalLM": "ValueError: MambaForCausalLM does not support LoRA yet.",
    "leave --enable-sleep-mode out": "  Value error, Sleep mode is not supported on current platform. [type=value_error]",
    "set WEFT_VLLM_REPLICAS": "ValueError: VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1",
    "WEFT_BASE_DTYPE=float16": "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
}


@pytest.mark.parametrize(("told", "log"), FAILURES.items())
def test_a_usual_failure_becomes_one_line_that_says_what_to_set(told: str, log: str) -> None:
    line = explain_start_failure(f"INFO something\n{log}\nRuntimeError: Engine core initialization failed.")
    assert line is not None
    assert "\n" not in line
    assert told in line


@pytest.mark.parametrize("told", ["2.0 GiB are free", "WEFT_VLLM_CONTEXT_LENGTH to less than 40960", "WEFT_MAX_RANK"])
def test_a_size_of_the_operators_own_is_named_in_place_of_the_share(told: str) -> None:
    """The share counts only where weft gives the server its memory."""
    line = explain_start_failure(FAILURES[told], is_sized_by_weft=False)
    assert line is not None
    assert "in WEFT_VLLM_ARGUMENTS or VLLM_CPU_KVCACHE_SPACE" in line
    assert "WEFT_VLLM_MEMORY_SHARE" not in line


def test_an_unknown_failure_is_left_to_the_log() -> None:
    assert explain_start_failure("RuntimeError: Engine core initialization failed. See root cause above.") is None
