"""Stand-ins for the hub's data sets that tinker-cookbook's recipes read, in the hub's names and columns.

``datasets.load_dataset("openai/gsm8k", "main")`` reads the folder of that name under the working directory, if there is one.
"""

import json
from collections.abc import Sequence
from pathlib import Path

Rows = Sequence[dict[str, object]]
CONVERSATIONS = "conversations.jsonl"
"""File of chats, as ``FromConversationFileBuilder`` reads it."""


def write_datasets(folder: Path) -> None:
    """Write every data set into ``folder``."""
    chats = [_chat(f"The number {number} is", "even" if number % 2 == 0 else "odd") for number in range(128)]
    _write(folder, "HuggingFaceH4/no_robots", "default", train=chats, test=chats[:8])
    # The recipe holds 1,024 back.
    _write(folder, "allenai/tulu-3-sft-mixture", "default", train=chats * 9)
    (folder / CONVERSATIONS).write_text(_lines(chats))
    sums = [
        {"question": f"What is {number} plus 1?", "answer": f"One more.\n#### {number + 1}"} for number in range(16)
    ]
    _write(folder, "openai/gsm8k", "main", train=sums, test=sums[:4])
    problems = [{"question": f"What is {number} plus 1?", "final_answer": str(number + 1)} for number in range(16)]
    _write(folder, "zwhe99/DeepMath-103K", "default", train=problems)
    choices = {"text": ["one", "two", "three", "four"], "label": ["A", "B", "C", "D"]}
    facts = [
        {"question": f"Which is number {number}?", "choices": choices, "answerKey": "ABCD"[number % 4]}
        | {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices"}
        for number in range(20)
    ]
    _write(folder, "hicai-zju/SciKnowEval", "default", test=facts)
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {number}\n\nAssistant: yes {number}",
            "rejected": f"\n\nHuman: Say {number}\n\nAssistant: no",
        }
        for number in range(16)
    ]
    # The recipe holds 1,024 back of a set that is not split.
    _write(folder, "Anthropic/hh-rlhf", "default", train=pairs * 4, test=pairs)
    thoughts = [
        {"conversations": [{"from": "human", "value": f"Think of {number}"}, {"from": "gpt", "value": "done"}]}
        for number in range(16)
    ]
    _write(folder, "open-thoughts/OpenThoughts3-1.2M", "default", train=thoughts)


def _chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _write(folder: Path, name: str, config: str, **splits: Rows) -> None:
    repository = folder / name
    repository.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (repository / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        (repository / f"{split}.jsonl").write_text(_lines(rows))


def _lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
