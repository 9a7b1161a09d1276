"""Every subcommand of the unmodified ``tinker`` command against a service; run as a script.

    python tinker_command.py BASE_URL API_KEY BASE_MODEL

Prints one JSON object: for each subcommand an empty text if it ran, else the reason that it was refused with.
"""

import base64
import http.server
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

_HOUR = timedelta(hours=1)
_COMMIT = "0" * 40


class Hub(http.server.ThreadingHTTPServer):
    """A hub's uploads: who asks, making a repository, and one commit of files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.repositories: list[str] = []
        self.files: dict[str, bytes] = {}


class _HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        """Say who asks. Of anything else there is nothing."""
        self._answer({"type": "user", "name": "me", "auth": {}}, status=200 if "whoami" in self.path else 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository, tell how files are to be sent, and take them."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.server.repositories.append(f"{asked.get('organization', 'me')}/{asked['name']}")
            self._answer({"url": f"{address_of(self.server)}/me/{asked['name']}"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = f"{address_of(self.server)}/{self.server.repositories[-1]}/commit/{_COMMIT}"
            self._answer({"commitUrl": commit, "commitOid": _COMMIT, "success": True})
        elif self.path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        else:
            self._answer({}, status=404)

    def _answer(self, content: dict[str, Any], *, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def address_of(hub: Hub) -> str:
    """Return the hub's address."""
    return f"http://127.0.0.1:{hub.server_address[1]}"


def window() -> tuple[str, str]:
    """Begin and end of the hours around this one: the script may run into the next."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (hour - _HOUR).isoformat(), (hour + 2 * _HOUR).isoformat()


def used(trainer: Any, sampler: Any) -> dict[str, float]:
    """Train and sample, and return the tokens of this session that the SDK is told, by type."""
    import tinker
    from tinker import types

    tokens = [1, 2, 3, 4, 5]
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    trainer.forward_backward([datum], "cross_entropy").result()
    params = types.SamplingParams(max_tokens=4, stop=[])
    sampler.sample(types.ModelInput.from_ints(tokens), num_samples=2, sampling_params=params).result()
    events = tinker.AdminClient().get_billing_usage(*window()).result().data
    return summed(trainer, [event.model_dump(mode="json") for event in events])


def summed(trainer: Any, events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tokens of the trainer's session, by type."""
    found: dict[str, float] = {}
    for event in events:
        info = event["event_info"]
        if event["session_id"] == trainer.model_id.split(":")[0] and info["type"] != "storage":
            count = info["count"] if info["type"] == "checkpoint" else info["token_count"]
            found[info["type"]] = found.get(info["type"], 0) + count
    return found


def arguments(paths: dict[str, str], key: str) -> dict[str, tuple[list[str], str]]:
    """The arguments of each subcommand, and what is typed into it."""
    run = paths["kept"].removeprefix("tinker://").split("/")[0]
    return {
        "version": ([], ""),
        "auth status": ([], ""),
        "auth whoami": ([], ""),
        "auth login": ([], f"{key}\n"),
        "auth logout": ([], ""),
        "model list": ([], ""),
        "run list": ([], ""),
        "run info": ([run], ""),
        "session export-trace": ([run.partition(":")[0]], ""),
        "checkpoint list": (["--run-id", run], ""),
        "checkpoint info": ([paths["kept"]], ""),
        "checkpoint set-ttl": ([paths["kept"], "--ttl", "3600"], ""),
        "checkpoint publish": ([paths["kept"]], ""),
        "checkpoint unpublish": ([paths["kept"]], ""),
        "checkpoint download": ([paths["kept"]], ""),
        "checkpoint push-hf": ([paths["kept"], "--repo", "me/mine"], ""),
        "checkpoint delete": (["--yes", paths["gone"]], ""),
        "billing usage": ([*window(), "--csv", "usage.csv"], ""),
        "billing checkpoint-storage": ([], ""),
    }


def subcommands(group: Any, above: str = "") -> Iterator[str]:
    """The names of all subcommands that a group has."""
    import click

    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from subcommands(found, f"{above}{name} ")
        else:
            yield f"{above}{name}"


def reason(error: BaseException | None, output: str) -> str:
    """Return the reason that a user is told, without the SDK's words around it."""
    told = f"{getattr(error, 'message', None) or error}: {getattr(error, 'details', None) or ''}"
    detail = re.search(r"weft does not offer[^'\"]*", told)
    return detail[0].partition(" for self.request_id")[0] if detail else f"{told} {output[-500:]}"


def main(base_url: str, key: str, base_model: str) -> dict[str, Any]:
    """Make a run with checkpoints, then run each subcommand."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    os.environ |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "HF_TOKEN": "hf_me"}
    os.environ |= {"HF_ENDPOINT": address_of(hub), "HOME": tempfile.mkdtemp()}
    os.chdir(os.environ["HOME"])
    import tinker
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    trainer = tinker.ServiceClient().create_lora_training_client(base_model=base_model, rank=4)
    paths = {name: trainer.save_state(name).result().path for name in ("kept", "gone")}
    billed = used(trainer, trainer.save_weights_and_get_sampling_client())
    given = arguments(paths, key)
    outcomes = {}
    for command, (options, typed) in given.items():
        done = CliRunner().invoke(main_cli, [*command.split(), *options], input=typed)
        outcomes[command] = "" if done.exit_code == 0 else reason(done.exception, done.output)
    as_json = {
        command: json.loads(CliRunner().invoke(main_cli, ["--format", "json", "billing", command, *options]).output)
        for command, options in (("usage", window()), ("checkpoint-storage", ()))
    }
    left = [one.checkpoint_id for one in tinker.RestClient().list_user_checkpoints().result().checkpoints]
    traces = [path.name for path in Path().glob("*.pftrace") if json.loads(path.read_text())["traceEvents"]]
    rows = Path("usage.csv").read_text().splitlines()
    hub.shutdown()
    (downloaded,) = Path().glob("*_weights_kept")
    files = {path.name: path.read_bytes() for path in downloaded.iterdir()}
    return {
        "outcomes": outcomes,
        "billed": billed,
        "billed_in_json": summed(trainer, as_json["usage"]["data"]),
        "stored_in_json": as_json["checkpoint-storage"]["data"],
        "rows": len(rows),
        "subcommands": sorted(subcommands(main_cli)),
        "left": left,
        "traces": len(traces),
        "downloaded": sorted(files),
        "repositories": hub.repositories,
        "pushed": sorted(hub.files),
        "is_pushed_whole": all(hub.files.get(name) == content for name, content in files.items()),
    }


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:4]))
