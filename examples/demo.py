"""Demo: two tenants train on one base model at the same time, through the real SDK.

Each tenant trains supervised, saves, resumes, samples and runs a little RL. ``make demo`` runs it; the exit status is 0
only if every step worked.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tinker
from tinker import types

from examples.data import policy_datum, supervised_datum
from testing.service_process import ServiceProcess

BASE_NAME = "weft/tiny"
PROMPT = "The animal says:"
SFT_STEPS_AT_MOST = 80
SFT_LEARNING_RATE = 3e-3
RL_STEPS = 12
RL_LEARNING_RATE = 5e-3
RL_SAMPLES = 24
RL_TOKENS = 12


@dataclass(frozen=True)
class Lesson:
    """Lesson of one tenant: a sentence taught by example, and letters taught by reward."""

    tenant: str
    sentence: str
    rewarded: frozenset[str]


@dataclass
class Report:
    """Measurements of one tenant's run."""

    lesson: Lesson
    loss_before: float = 0.0
    loss_after: float = 0.0
    loss_resumed: float = 0.0
    sft_steps: int = 0
    base_says: str = ""
    adapter_says: str = ""
    resumed_says: str = ""
    rewards: list[float] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Return a sentence for each step that did not work."""
        problems = {
            "the adapter does not say its sentence": self.lesson.sentence not in self.adapter_says,
            "the base model says the adapter's sentence": self.lesson.sentence in self.base_says,
            "the resumed adapter does not say the sentence": self.lesson.sentence not in self.resumed_says,
            "the loss did not fall": not self.loss_after < 0.2 * self.loss_before,
            "the resumed loss is not that of the saved adapter": not self.loss_resumed <= 1.5 * self.loss_after + 0.5,
            "the reward did not rise": not self.reward_after > self.reward_before + 0.2,
        }
        return [problem for problem, is_seen in problems.items() if is_seen]

    @property
    def reward_before(self) -> float:
        """Mean reward of the first RL step."""
        return self.rewards[0]

    @property
    def reward_after(self) -> float:
        """Mean reward of the last two RL steps."""
        return sum(self.rewards[-2:]) / 2


class Progress:
    """Printer of whole lines from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, tenant: str, text: str) -> None:
        """Print one line under the tenant's name."""
        with self._lock:
            print(f"  [{tenant:>4}] {text}", flush=True)


class TenantRun:
    """Run of one tenant against the service."""

    def __init__(self, *, base_url: str, api_key: str, lesson: Lesson, progress: Progress) -> None:
        self._service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        self._lesson = lesson
        self._progress = progress
        self.report = Report(lesson)

    def run(self) -> Report:
        """Train, save, resume, sample and reinforce; return the measurements."""
        path = self._supervised()
        self._resume(path)
        self._reinforce()
        self._service.close("success")
        return self.report

    def _say(self, text: str) -> None:
        self._progress.say(self._lesson.tenant, text)

    def _supervised(self) -> str:
        trainer = self._service.create_lora_training_client(base_model=BASE_NAME, rank=16, seed=7).result()
        self._tokenizer = trainer.get_tokenizer()
        self._prompt: list[int] = self._tokenizer.encode(PROMPT)
        sentence: list[int] = self._tokenizer.encode(self._lesson.sentence)
        self._sentence_tokens = len(sentence)
        self._datum = supervised_datum(self._prompt, sentence)
        base = self._service.create_sampling_client(base_model=BASE_NAME).result()
        self.report.base_says = self._ask(base)
        for step in range(1, SFT_STEPS_AT_MOST + 1):
            computed = trainer.forward_backward([self._datum], "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=SFT_LEARNING_RATE))
            loss = computed.result().metrics["loss:sum"]
            stepped.result()
            if step == 1:
                self.report.loss_before = loss
            self.report.loss_after, self.report.sft_steps = loss, step
            if step % 10 == 0:
                sampler = trainer.save_weights_and_get_sampling_client().result()
                self.report.adapter_says = self._ask(sampler)
                self._say(f"step {step:>2}  loss {loss:8.3f}  says {self.report.adapter_says!r}")
                if self._lesson.sentence in self.report.adapter_says and loss < 0.1 * self.report.loss_before:
                    break
        saved = trainer.save_state("trained").result().path
        self._say(f"saved {saved}")
        return str(saved)

    def _resume(self, path: str) -> None:
        trainer = self._service.create_training_client_from_state_with_optimizer(path).result()
        computed = trainer.forward_backward([self._datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=SFT_LEARNING_RATE / 10)).result()
        self.report.loss_resumed = computed.result().metrics["loss:sum"]
        self.report.resumed_says = self._ask(trainer.save_weights_and_get_sampling_client().result())
        self._say(f"resumed with its optimiser: loss {self.report.loss_resumed:.3f}, says {self.report.resumed_says!r}")

    def _reinforce(self) -> None:
        trainer = self._service.create_lora_training_client(base_model=BASE_NAME, rank=16, seed=11).result()
        for step in range(1, RL_STEPS + 1):
            sampler = trainer.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=RL_TOKENS, temperature=1.0, seed=step, stop=[])
            prompt = types.ModelInput.from_ints(self._prompt)
            samples = sampler.sample(prompt, num_samples=RL_SAMPLES, sampling_params=params).result().sequences
            rewards = [self._reward(sample) for sample in samples]
            mean = sum(rewards) / len(rewards)
            self.report.rewards.append(mean)
            data = [
                policy_datum(self._prompt, sample, [reward - mean] * len(sample.tokens))
                for sample, reward in zip(samples, rewards, strict=True)
            ]
            computed = trainer.forward_backward(data, "importance_sampling")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=RL_LEARNING_RATE, grad_clip_norm=1.0))
            computed.result()
            stepped.result()
            if step % 4 == 0:
                self._say(f"RL step {step:>2}  reward {mean:.2f}")

    def _reward(self, sample: types.SampledSequence) -> float:
        text = self._tokenizer.decode(sample.tokens, skip_special_tokens=True)
        return sum(character in self._lesson.rewarded for character in text) / len(sample.tokens)

    def _ask(self, sampler: tinker.SamplingClient) -> str:
        params = types.SamplingParams(max_tokens=self._sentence_tokens, temperature=0.0, stop=[])
        answer = sampler.sample(types.ModelInput.from_ints(self._prompt), 1, params).result()
        return str(self._tokenizer.decode(answer.sequences[0].tokens))


def table(reports: list[Report]) -> str:
    """Return the summary as text, with a column for each tenant."""
    lines = [f"{'':22}" + "".join(f"{report.lesson.tenant:>28}" for report in reports)]

    def row(title: str, cells: list[str]) -> None:
        lines.append(f"{title:22}" + "".join(f"{cell:>28}" for cell in cells))

    row("loss before", [f"{report.loss_before:.3f}" for report in reports])
    row("loss after", [f"{report.loss_after:.3f} ({report.sft_steps} steps)" for report in reports])
    row("loss resumed", [f"{report.loss_resumed:.3f}" for report in reports])
    row("base says", [repr(report.base_says)[:26] for report in reports])
    row("adapter says", [repr(report.adapter_says)[:26] for report in reports])
    row("resumed adapter says", [repr(report.resumed_says)[:26] for report in reports])
    row("reward before", [f"{report.reward_before:.2f}" for report in reports])
    row("reward after", [f"{report.reward_after:.2f}" for report in reports])
    return "\n".join(lines)


def make_tenant(data: Path, name: str) -> str:
    """Make a tenant with ``weft tenant create`` and return its key."""
    command = [sys.executable, "-m", "cli.main", "tenant", "create", name, "--data", str(data)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run the demo; return 0 if every step worked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the tiny base's folder")
    model: Path = parser.parse_args().model
    lessons = [
        Lesson("cat", " meow meow meow", frozenset("meow ")),
        Lesson("dog", " woof woof woof", frozenset("0123456789")),
    ]
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        data = Path(folder) / "data"
        with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={model}"]) as service:
            print(f"weft serves {BASE_NAME} on {service.base_url}; two tenants train at once:")
            progress = Progress()
            runs = [
                TenantRun(
                    base_url=service.base_url,
                    api_key=make_tenant(data, lesson.tenant),
                    lesson=lesson,
                    progress=progress,
                )
                for lesson in lessons
            ]
            with ThreadPoolExecutor(len(runs)) as pool:
                reports = list(pool.map(TenantRun.run, runs))
    print("\n" + table(reports) + "\n")
    failures = [f"{report.lesson.tenant}: {failure}" for report in reports for failure in report.failures()]
    for failure in failures:
        print(f"NOT SEEN  {failure}")
    if not failures:
        print(
            "Everything was seen. To go on by yourself:\n"
            f"  .venv/bin/weft serve --base-model {BASE_NAME}={model}\n"
            "listens on http://127.0.0.1:8642 and prints TINKER_BASE_URL and TINKER_API_KEY; any tinker program then runs."
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
