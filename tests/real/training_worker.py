"""Compares exported rollouts with what checkpoints compute and with what agents saw, in a process that has torch.

Takes the folder that `examples.grpo` wrote and prints JSON.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rollouts = [json.loads(path.read_text()) for path in sorted(folder.glob("rollout-*.json"))]
    paths = [path for path in folder.iterdir() if path.is_dir()]
    models = {path.name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths}
    own, other, num_split = list[float](), list[float](), 0
    for record in (record for rollout in rollouts for record in rollout["records"]):
        split = [turn for turn in record["turns"] if len(_versions(record, turn)) > 1]
        num_split += len(split)
        computed = {name: _logprobs(models[name], record["token_ids"]) for name in _versions(record)}
        for at, version in _made(record):
            differences = {name: abs(found[at] - record["logprobs"][at]) for name, found in computed.items()}
            own.append(differences.pop(version))
            if any(turn["output_start"] <= at < turn["end"] for turn in split):
                other += differences.values()
    told = {
        "num_tokens": len(own),
        "furthest_from_own": max(own),
        "median_from_other": median(other) if other else None,
        "num_split_turns": num_split,
        "unlike": [unlike for rollout in rollouts for unlike in _unlike(rollout, folder)],
    }
    print(json.dumps(told))


def _versions(record: dict[str, Any], turn: dict[str, Any] | None = None) -> set[str]:
    """The weights that made a turn of a record, or all of them."""
    start, end = (turn["output_start"], turn["end"]) if turn else (0, len(record["token_ids"]))
    return {span["version"] for span in record["versions"] if start <= span["start"] < end}


def _made(record: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Where the tokens are that the mask marks, and which weights made each."""
    version_at = {at: span["version"] for span in record["versions"] for at in range(span["start"], span["end"])}
    return ((at, version_at[at]) for at, is_marked in enumerate(record["loss_mask"]) if is_marked)


@torch.no_grad()
def _logprobs(model: Any, ids: list[int]) -> list[float]:
    """The log-probability of each token given those before it; 0 for the first."""
    tokens = torch.tensor([ids])
    found = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return [0.0, *found.flatten().tolist()]


def _unlike(rollout: dict[str, Any], folder: Path) -> list[str]:
    """Trajectories whose agents saw something else than what is marked for training."""
    tokenizer = AutoTokenizer.from_pretrained(next(path for path in folder.iterdir() if path.is_dir()))
    made: dict[str, list[tuple[float, str]]] = defaultdict(list)
    num_marked: dict[str, int] = defaultdict(int)
    for record in rollout["records"]:
        ids, mask, trajectory_id = record["token_ids"], record["loss_mask"], record["trajectory_id"]
        num_marked[trajectory_id] += sum(mask)
        for turn in (turn for turn in record["turns"] if not turn["is_repeated"]):
            marked = [ids[at] for at in range(turn["output_start"], turn["end"]) if mask[at]]
            made[trajectory_id].append((turn["ended_at"], tokenizer.decode(marked, skip_special_tokens=True)))
    found = {one: ([text for _, text in sorted(made[one])], num_marked[one]) for one in made}
    seen = {one["trajectory_id"]: (one["answers"], one["completion_tokens"]) for one in rollout["played"]}
    return [one for one in sorted(found.keys() | seen.keys()) if found.get(one) != seen.get(one)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
