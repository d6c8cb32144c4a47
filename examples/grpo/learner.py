"""Learns from exported records: group-relative advantages, importance ratios against the recorded log-probabilities,
and a clipped policy gradient (GRPO).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of a trajectory in a trainer's form. All lists are as long as `ids`.

    Args:
        mask: which tokens the model made, and are to be learned from.
        logprobs: of these tokens, under the weights that made them.
        is_stale: which of them other weights made than the ones that are being trained.
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    is_stale: list[bool]
    advantage: float


@dataclass(frozen=True, slots=True)
class Report:
    """One step. `drift`: the mean |log ratio| of tokens that the trained weights made, before they change; it is 0 if
    engines and trainer compute alike.
    """

    mean_reward: float
    drift: float
    stale_share: float
    num_tokens: int
    num_left_out: int
    versions: list[str]


def samples(records: Iterable[dict[str, Any]], version: str) -> list[Sample]:
    """The records that can be learned from, each with its advantage over its siblings.

    Records without a reward or with turns that have no tokens are left out.
    """
    usable = [one for one in records if one["reward"] is not None and not one["missing"] and one["logprobs"]]
    rewards: dict[str, dict[str, float]] = defaultdict(dict)  # a trajectory counts once, however many branches it has
    for one in usable:
        rewards[one["group_id"]][one["trajectory_id"]] = one["reward"]
    return [_sample(one, list(rewards[one["group_id"]].values()), version) for one in usable]


def _sample(record: dict[str, Any], rewards: list[float], version: str) -> Sample:
    is_stale = [False] * len(record["token_ids"])
    for span in record["versions"]:
        if span["version"] != version:
            is_stale[span["start"] : span["end"]] = [True] * (span["end"] - span["start"])
    advantage = (record["reward"] - fmean(rewards)) / (pstdev(rewards) + 1e-4)
    return Sample(record["token_ids"], [*map(bool, record["loss_mask"])], record["logprobs"], is_stale, advantage)


class Learner:
    """A model that is trained.

    Args:
        checkpoint: a folder in the form of Hugging Face, with the tokenizer.
        clip: ratios beyond 1 ± this give no gradient that leads further away.
    """

    def __init__(self, checkpoint: Path, learning_rate: float, clip: float = 0.2, batch_size: int = 16) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self._clip = clip
        self._batch_size = batch_size

    def save(self, folder: Path) -> Path:
        """Write a checkpoint that engines can load."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return folder

    def update(self, records: list[dict[str, Any]], version: str) -> Report:
        """One step of gradient descent on a rollout.

        Args:
            version: the name of the weights that are trained, before this step.

        Raises:
            ValueError: no record can be learned from.
        """
        learned = samples(records, version)
        if not learned:
            raise ValueError(
                f"none of {len(records)} records has a reward and tokens; gateways record them with token_legs=auto"
            )
        num_tokens = sum(sum(one.mask) for one in learned)
        num_stale, drift = 0, 0.0
        self._optimizer.zero_grad()
        for start in range(0, len(learned), self._batch_size):
            batch = learned[start : start + self._batch_size]
            log_ratios, mask, is_stale, advantages = self._compared(batch)
            ratios = log_ratios.exp()
            clipped = ratios.clamp(1 - self._clip, 1 + self._clip)
            gains = torch.minimum(ratios * advantages, clipped * advantages)
            (-gains[mask].sum() / max(num_tokens, 1)).backward()
            num_stale += int((mask & is_stale).sum())
            drift += float(log_ratios.detach()[mask & ~is_stale].abs().sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        rewards = {one["trajectory_id"]: one["reward"] for one in records}
        return Report(
            fmean(reward for reward in rewards.values() if reward is not None),
            drift / max(num_tokens - num_stale, 1),
            num_stale / max(num_tokens, 1),
            num_tokens,
            len(records) - len(learned),
            sorted({span["version"] for one in records for span in one["versions"]}),
        )

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """The log-probability of each token but the first, given those before it; [sequences, tokens - 1]."""
        logits = self.model(ids).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def _compared(self, batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log ratios, masks and staleness of each token but the first, and advantages; the padding has mask 0.

        What follows a token does not change its log-probability, so padding at the end needs no attention mask.
        """
        ids, mask, recorded, is_stale = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(getattr(one, name)) for one in batch], batch_first=True)
            for name in ("ids", "mask", "logprobs", "is_stale")
        )
        advantages = torch.tensor([[one.advantage] for one in batch])
        return self.logprobs(ids) - recorded[:, 1:], mask[:, 1:], is_stale[:, 1:], advantages
