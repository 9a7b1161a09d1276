"""Settings of the HTTP server: time limits, connections, and what one tenant may have in progress in one API process."""

from datetime import timedelta

from pydantic import Field
from pydantic_settings import BaseSettings


class HttpSettings(BaseSettings):
    """Bounds of one API process. They protect the process; ``LimitSettings`` bound what a tenant may have stored."""

    max_connections: int = Field(
        default=16384,
        ge=16,
        description="Most connections of one API process, or fewer if the process may open fewer files. A further "
        "connection takes the place of an idle one, or else of one of the tenant or address that has the most.",
    )
    header_timeout: timedelta = Field(
        default=timedelta(seconds=20),
        description="Longest time from a connection's beginning, or a request's first byte, to the end of its headers.",
    )
    keep_alive: timedelta = Field(
        default=timedelta(seconds=75), description="Time without a request after which a connection is closed."
    )
    send_timeout: timedelta = Field(
        default=timedelta(seconds=60),
        description="Longest time for which a client may read nothing of its answer before it is cut off.",
    )
    body_timeout: timedelta = Field(
        default=timedelta(seconds=20),
        description="Longest time without a byte of a body, after which the request is answered 408.",
    )
    body_threads: int = Field(
        default=2,
        ge=1,
        description="Threads of one API process that parse, tokenize and encode large bodies. One tenant has at most half "
        "of them.",
    )
    tenant_body_bytes: int = Field(
        default=128 * 2**20,
        ge=1024,
        description="Most bytes of request bodies of one tenant in one API process. Further bodies wait unread.",
    )
    tenant_requests: int = Field(
        default=128,
        ge=1,
        description="Most requests of one tenant that one API process answers at a time. Further requests wait, "
        "and after 10 s are answered 429, which the SDK repeats.",
    )
    tenant_polls: int = Field(
        default=8192,
        ge=1,
        description="Most held polls (retrieve_future) of one tenant in one API process. A further poll waits for a place, and "
        "after 2 s is answered 408, upon which every SDK polls again. One SDK client has up to 2,000 samples in flight, each "
        "with a poll.",
    )
    tenant_streams: int = Field(
        default=1024,
        ge=1,
        description="Most streams, chats, pauses and downloads in progress of one tenant in one API process. Further ones "
        "are answered 429.",
    )
    tenant_changes: int = Field(
        default=20_000,
        ge=1,
        description="Most changes of one tenant in an hour that one API process takes: each has an entry in the audit log, as a "
        "model, a sampler or a key that is made, a session that is ended, a checkpoint that is deleted. A KiB of "
        "metadata of a new session or model is one, too. Further ones are answered 429; a key is revoked all the same.",
    )
    sdk_compression: bool = Field(
        default=True,
        description="Have the SDK compress the bodies of forward and forward_backward (zstd). Off: less work for clients "
        "on the same machine.",
    )
    sdk_pyqwest: bool = Field(
        default=True,
        description="Have SDKs from 0.22 on send with pyqwest, their faster transport. Its threads can abort a client's process "
        "that ends by itself on a Python before 3.14 (exit code 134, after all its work). Off: with httpx.",
    )
    sdk_parallel_chunks: bool = Field(
        default=True,
        description="Have the SDK send the chunks of one large forward_backward side by side. Off: one after another.",
    )
    sdk_joint_polls: bool = Field(
        default=False,
        description="Have SDKs from 0.26 on wait for all samples of a sampling client with one poll (retrieve_futures) instead "
        "of a held poll and a connection for each sample. Leave it off while API processes of a version before answer "
        "beside.",
    )
    sdk_custom_losses: bool = Field(
        default=True,
        description="Have SDKs from 0.36 on upload traced losses (create_custom_loss), which the trainers then run. Off while "
        "API processes or trainers that know no custom losses, of a version before, work beside: they would refuse one.",
    )
    sdk_tokens: bool = Field(
        default=True,
        description="Have SDKs from 0.38 on exchange their key for a token, which `whoami` needs. Off while API processes that "
        "know no tokens, of a version before, answer beside: they would refuse one.",
    )
