"""Calls that tinker-cookbook 0.6.1 makes of the SDK around its training loops, by hand; run as a script.

    python sdk_cookbook.py BASE_URL API_KEY BASE_MODEL

The calls are those of ``checkpoint_utils``, ``supervised.train``, ``distillation.train_off_policy`` and
``scripts.save_audit_log``. Prints one JSON line.
"""

import sys
import warnings
from datetime import date
from typing import Any

import tinker

PROMPT = [84, 104, 101, 32, 99, 97, 116]
METADATA = {"renderer_name": "role_colon", "wandb_link": "none", "step": 3, "flags": {"dirty": True}}


def main(base_url: str, api_key: str, base_model: str) -> dict[str, Any]:
    """Open, train, save, resume, look up, distil and clean up as the cookbook does."""
    seen: dict[str, Any] = {}
    with tinker.ServiceClient(
        base_url=base_url, api_key=api_key, user_metadata={"recipe": "test"}, display_name="x" * 900
    ) as service:
        trainer = service.create_lora_training_client(base_model, rank=4, user_metadata=METADATA).result()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(PROMPT[:-1]),
            loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)},
        )
        computed = trainer.forward_backward([datum], loss_fn="cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        seen["logprobs"] = len(computed.result().loss_fn_outputs[0]["logprobs"].data)
        state = trainer.save_state("000001", ttl_seconds=3600).result().path
        weights = trainer.save_weights_for_sampler("000001", ttl_seconds=3600).result().path
        resumed = service.create_training_client_from_state_with_optimizer(state, user_metadata=METADATA).result()
        rest = service.create_rest_client()
        for name, path in (("trained", weights), ("resumed", resumed.save_state("000002").result().path)):
            run = rest.get_training_run_by_tinker_path(path).result()
            seen[name] = {"metadata": run.user_metadata, "base": run.base_model, "owner": run.model_owner}
        sampler = service.create_sampling_client(model_path=weights).result()
        seen["sampled_base"] = sampler.get_base_model()
        params = tinker.SamplingParams(max_tokens=1, temperature=0.0)
        prompt = tinker.ModelInput.from_ints(PROMPT)
        teacher = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=4).result()
        seen["topk"] = [0 if place is None else len(place) for place in teacher.topk_prompt_logprobs or []]
        seen["whoami"] = rest.whoami().result().org_urn
        rest.delete_checkpoint_from_tinker_path(state).result()
        rest.delete_checkpoint_from_tinker_path(state).result()
        seen["left"] = len(rest.list_checkpoints(state.removeprefix("tinker://").split("/")[0]).result().checkpoints)
    tinker.AdminClient(base_url=base_url, api_key=api_key).get_audit_log(day=date(2026, 1, 1)).result()
    seen["audit"] = "runs"
    return seen


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore", FutureWarning)
    end(main(*sys.argv[1:4]))
