"""Weights taken out of a service by the SDK and by tinker-cookbook's own ``weights``; run as a script.

    PYTHONPATH=COOKBOOK python sdk_external.py BASE_URL API_KEY OTHER_KEY BASE_MODEL BASE_FOLDER

Prints one JSON line.
"""

import os
import sys
import tempfile
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pyrage
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

TOKENS = [84, 104, 101, 32, 99, 97, 116]
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIL/iaXGOGTkkObXsLQ7tTMqhwaM5gmxydZxkPHkY0xfh somebody"


def trained(service: tinker.ServiceClient, base_model: str) -> tuple[tinker.TrainingClient, list[float]]:
    """Return a client of a trained adapter, and the adapter's logprobs of ``TOKENS`` as the service computes them."""
    trainer = service.create_lora_training_client(base_model, rank=4, seed=3).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
    computed = trainer.forward([datum], "cross_entropy").result()
    return trainer, list(computed.loss_fn_outputs[0]["logprobs"].data)


def logprobs(model: torch.nn.Module) -> list[float]:
    """Return a model's logprobs of ``TOKENS``, fp32."""
    with torch.no_grad():
        scores = model(torch.tensor([TOKENS[:-1]])).logits[0].float().log_softmax(-1)
    return scores[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


def farthest(some: list[float], others: list[float]) -> float:
    """Return the largest difference of two lists."""
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def refusal(save: Any) -> str:
    """Return what the client is told of a save that fails."""
    try:
        return f"saved {save().result().path}"
    except tinker.RequestFailedError as error:
        return f"{error.category}: {error}"


def opened(folder: str, identity: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an export that is sealed to ``identity``."""
    config = pyrage.decrypt((Path(folder) / "adapter_config.json.age").read_bytes(), [identity])
    (Path(folder) / "adapter_config.json").write_bytes(config)
    sealed = Path(folder) / "adapter_model.safetensors.age"
    pyrage.decrypt_file(str(sealed), str(sealed.with_suffix("")), [identity])
    return load_file(sealed.with_suffix(""))


def foreign(key: str, path: str) -> str:
    """Return how another tenant's request for links is answered."""
    try:
        tinker.ServiceClient(api_key=key).create_rest_client().get_external_weights_urls(path).result()
    except tinker.APIStatusError as error:
        return str(error.status_code)
    return "found"


def main(base_url: str, key: str, other_key: str, base_model: str, folder: str) -> dict[str, Any]:
    """Save, seal, download and merge."""
    os.environ |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
    service, identity = tinker.ServiceClient(), pyrage.x25519.Identity.generate()
    trainer, expected = trained(service, base_model)
    recipients = [str(identity.to_public()), SSH_KEY]
    saved = trainer.save_weights_external("plain", ttl_seconds=3600).result().path
    sealed = trainer.save_weights_external("sealed", age_encryption_recipients=recipients).result().path
    state = trainer.save_state("kept").result().path
    out = Path(tempfile.mkdtemp())
    found = {
        name: weights.download(tinker_path=path, output_dir=str(out / name))
        for name, path in (("plain", saved), ("sealed", sealed), ("training", state))
    }
    rest = service.create_rest_client()
    listed = rest.list_user_checkpoints().result().checkpoints
    run = state.removeprefix("tinker://").partition("/")[0]
    files = rest.get_external_weights_urls(saved).result()
    whole = {
        name: load_file(Path(place) / "adapter_model.safetensors") for name, place in found.items() if name != "sealed"
    }
    whole["sealed"] = opened(found["sealed"], identity)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    by_peft = logprobs(PeftModel.from_pretrained(base, found["plain"]))
    weights.build_hf_model(base_model=folder, adapter_path=found["training"], output_path=str(out / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    return {
        "path": saved.removeprefix(f"tinker://{run}/"),
        "files": sorted(files.urls),
        "sealed_files": sorted(rest.get_external_weights_urls(sealed).result().urls),
        "fetched": len(urllib.request.urlopen(files.urls["adapter_config.json"]).read()) > 0,
        "types": {
            one.checkpoint_id: one.checkpoint_type for one in listed if one.tinker_path.startswith(f"tinker://{run}/")
        },
        "expires": [one.checkpoint_id for one in listed if one.expires_at is not None],
        "sizes": all(one.size_bytes for one in listed),
        "left": [one.tinker_path for one in listed if one.checkpoint_id == "external_weights/download"],
        "equal": all(
            tensors.keys() == whole["plain"].keys() and all(torch.equal(tensors[k], whole["plain"][k]) for k in tensors)
            for tensors in whole.values()
        ),
        "by_peft": farthest(by_peft, expected),
        "by_cookbook": farthest(logprobs(merged), expected),
        "taken": refusal(lambda: trainer.save_weights_external("plain")),
        "unknown": refusal(lambda: trainer.save_weights_external("x", age_encryption_recipients=["age1nobody"])),
        "many": refusal(lambda: trainer.save_weights_external("x", age_encryption_recipients=recipients * 6)),
        "trained_on": trainer.optim_step(tinker.AdamParams()).result() is not None,
        "foreign": foreign(other_key, saved),
        "loaded": refusal(lambda: trainer.load_state(saved)),
    }


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore", FutureWarning)
    end(main(*sys.argv[1:6]))
