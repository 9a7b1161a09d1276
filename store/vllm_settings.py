"""Settings of the vLLM servers that sample: those that are there already, and those that weft starts."""

from datetime import timedelta
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings


class VllmSettings(BaseSettings):
    """Addresses and keys of servers, and command, sizes and memory of weft's own."""

    vllm_urls: tuple[str, ...] = Field(
        default=(),
        description="vLLM servers that sample instead of this process, each as `[NAME=]URL[#REPLICA]`. NAME is the "
        "base model that the server serves; default: every base model. REPLICA is the replica's name in reports and "
        "commands; default: `server-0`, `server-1` and so on.",
        repr=False,
    )
    vllm_api_key: str | None = Field(default=None, description="API key of the vLLM servers.", repr=False)
    vllm_data_dir: Path | None = Field(
        default=None,
        description="Path under which the servers of `vllm_urls` see the data folder, from which they read adapters. "
        "Default: the same path.",
    )
    vllm_replicas: int = Field(
        default=0, ge=0, description="Number of vLLM servers that weft starts itself for each base model."
    )
    vllm_command: tuple[str, ...] = Field(
        default=(),
        description="Command that starts a vLLM server, as a list. Default: the first vLLM that is found in `.venv-vllm` "
        "(`make vllm`) of the current folder or of weft's checkout, in weft's own environment, or as `vllm` on the `PATH`.",
    )
    vllm_arguments: tuple[str, ...] = Field(
        default=(), description="Further arguments of that command, such as `--tensor-parallel-size`, `2`."
    )
    beside_trainer: bool = Field(
        default=False,
        description="A trainer runs on this machine, too, on the first GPU or the one that the device names: the vLLM servers "
        "of `weft pool` leave it half of what is left there. `weft up` sets it.",
    )
    vllm_start: timedelta = Field(
        default=timedelta(minutes=15),
        gt=timedelta(0),
        description="Longest time that a vLLM server that weft starts takes until it answers. One that takes longer is "
        "ended and started anew, so a large base on a slow disk needs more.",
    )
    vllm_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=0.95,
        description="Share of the memory left on a device that its vLLM servers take together. Default: half of it beside "
        "a trainer, on a CPU or on the trainer's GPU, and nine tenths of another GPU. Memory or key-value sizes in the "
        "arguments of vLLM win over it.",
    )
    vllm_max_loras: int = Field(
        default=8,
        ge=2,
        description="Most adapters in one batch of a vLLM server. One of them stands for the bare base.",
    )
    vllm_sequences: int = Field(
        default=256,
        ge=2,
        description="Most sequences on one vLLM server at a time. A ninth of them is kept for tenants that come beside a "
        "flood. Servers that you start yourself need `--max-num-seqs` of at least this, or sequences wait in their "
        "queue, where tenants take no turns.",
    )
    vllm_context_length: int | None = Field(
        default=None, ge=1, description="Context length of the vLLM servers in tokens. Default: the base model's own."
    )
    vllm_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens that one vLLM server computes at a time; a longer prompt is computed "
        "alone. A smaller number makes other samples wait less behind long prompts. Tenants take turns. Meant for "
        "servers that do not split prompts, as on a CPU. Default: no limit.",
    )
    vllm_head_adapters: bool | None = Field(
        default=None,
        description="Accept adapters that change the output head (`train_unembed`). vLLM cannot score prompts beside "
        "such adapters, so the trainer's forward scores them: in `weft serve` on the base in memory, in a pool on a base that "
        "a process of its own loads on the CPU. Off: the servers score prompts themselves. Default: on for architectures "
        "of which vLLM takes them, as Llama, Qwen3, Mixtral and Phi-3; off for others, as Qwen2, Mistral, Gemma and GPT-OSS.",
    )
    vllm_tune_cpu: bool = Field(
        default=True,
        description="Tune vLLM servers that weft starts on a machine without an accelerator: engine and model share a "
        "process, and the first server leaves the last core free. Off: vLLM's own way.",
    )
