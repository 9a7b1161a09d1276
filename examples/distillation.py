"""Distillation on the policy: a student draws, a teacher scores each of its tokens, and the student goes towards the teacher.

    python -m examples.distillation

The teacher is an adapter that was taught a sentence by example. The student never sees the sentence. Each token's advantage is
the teacher's log-probability minus the student's, and minus the group's mean at that place as a baseline. So a step lessens the
reverse KL divergence (Agarwal et al. 2023, "On-Policy Distillation of Language Models").
"""

from typing import Any

import tinker
from tinker import types

from examples.data import policy_datum, supervised_datum
from examples.service import new_trainer, parse_options

PROMPT, SENTENCE = "The teacher says:", " meow"
GROUP = 64
TEACHER_STEPS = 10


def taught_teacher(trainer: Any, prompt: list[int], sentence: list[int]) -> Any:
    """Return a sampling client of an adapter that mostly says the sentence."""
    for _ in range(TEACHER_STEPS):
        trainer.forward_backward([supervised_datum(prompt, sentence)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return trainer.save_weights_and_get_sampling_client().result()


def log_ratios(sample: types.SampledSequence, judged: list[float]) -> list[float]:
    """Return the teacher's log-probability minus the student's for each token. The mean is minus the reverse KL divergence."""
    return [theirs - own for theirs, own in zip(judged, sample.logprobs, strict=True)]


def main() -> None:
    """Train the student, and print the KL divergence to the teacher before each step, in nats a token."""
    options = parse_options(__doc__, steps=20)
    with tinker.ServiceClient() as service:
        student = new_trainer(service, options)
        tokenizer = student.get_tokenizer()
        prompt, sentence = tokenizer.encode(PROMPT), tokenizer.encode(SENTENCE)
        teacher = taught_teacher(new_trainer(service, options), prompt, sentence)
        params = types.SamplingParams(max_tokens=len(sentence), temperature=1.0, stop=[])
        for step in range(options.steps):
            sampler = student.save_weights_and_get_sampling_client().result()
            drawn = sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params).result().sequences
            scored = [teacher.compute_logprobs(types.ModelInput.from_ints(prompt + one.tokens)) for one in drawn]
            gaps = [log_ratios(one, scores.result()[len(prompt) :]) for one, scores in zip(drawn, scored, strict=True)]
            mean = sum(map(sum, gaps)) / sum(map(len, gaps))
            baselines = [sum(column) / GROUP for column in zip(*gaps, strict=True)]
            data = [
                policy_datum(prompt, one, [gap - usual for gap, usual in zip(row, baselines, strict=True)])
                for one, row in zip(drawn, gaps, strict=True)
            ]
            computed = student.forward_backward(data, "importance_sampling")
            student.optim_step(types.AdamParams(learning_rate=7e-3, grad_clip_norm=1.0)).result()
            computed.result()
            print(f"step {step:>3}  kl {-mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
