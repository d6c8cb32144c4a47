"""The turns of a trajectory in a trainer's form: one sequence of tokens for each branch, from its root to its leaf.

A turn that several branches share is trained on once: its tokens are marked only in the loss mask of the branch whose
leaf ended first. So the masks of a trajectory mark each generated token exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.state.ledger import Entry
from gateway.tokens.packed import KeptTurn, all_ids, chain


@dataclass(frozen=True, slots=True)
class Branch:
    """A root, the turn that continues it, and so on to a turn that none continues.

    Args:
        num_repeated: how many of its first turns are also in an earlier branch.
    """

    turns: list[KeptTurn]
    num_repeated: int


def branches(turns: dict[str, KeptTurn]) -> list[Branch]:
    """All branches, in the order of their leaves; `turns` is in the order of their ends."""
    parents = {turn.parent for turn in turns.values()}
    seen: set[str] = set()
    found = []
    for leaf in turns.values():
        if leaf.turn_id in parents:
            continue
        path = chain(turns, leaf)
        found.append(Branch(path, sum(turn.turn_id in seen for turn in path)))
        seen.update(turn.turn_id for turn in path)
    return found


def missing(entry: Entry, turns: dict[str, KeptTurn]) -> list[dict[str, str]]:
    """The finished turns of a trajectory whose tokens are missing, and why: `dropped`, `not_wanted`, or, if they passed
    through, `no_token_legs`.
    """
    return [
        {"turn_id": row["turn_id"], "why": _WHY.get(row.get("tokens", ""), "no_token_legs")}
        for row in entry.turns
        if row.get("outcome") == "finished" and row["turn_id"] not in turns
    ]


_WHY = {"kept": "dropped", "not_wanted": "not_wanted"}


def records(entry: Entry, turns: dict[str, KeptTurn]) -> Iterator[dict[str, Any]]:
    """A trajectory's branches in exported form, with numpy arrays; one record without tokens if nothing is kept. Each
    is made when it is asked for.
    """
    found, model_of = branches(turns), _models(entry)
    about = {
        "trajectory_id": entry.record.trajectory_id,
        "group_id": entry.record.group_id,
        "rollout_id": entry.record.rollout_id,
        "state": entry.record.state.value,
        **_reward(entry),
        "metadata": entry.declared.get("metadata", {}),
        "num_branches": len(found),
        "missing": missing(entry, turns),
    }
    for number, branch in enumerate(found or [Branch([], 0)]):
        yield {**about, "branch": number, **_sequence(branch, model_of)}


def tree(entry: Entry, turns: dict[str, KeptTurn]) -> dict[str, Any]:
    """A trajectory's turns one by one, as `GET /v1/trajectories/{id}/tokens` shows them, with numpy arrays."""
    model_of = _models(entry)
    return {
        "id": entry.record.trajectory_id,
        "object": "trajectory.tokens",
        "group_id": entry.record.group_id,
        "rollout_id": entry.record.rollout_id,
        "state": entry.record.state.value,
        **_reward(entry),
        "turns": [_turn(turn, model_of) for turn in turns.values()],
        "branches": [[turn.turn_id for turn in branch.turns] for branch in branches(turns)],
        "missing": missing(entry, turns),
    }


def _reward(entry: Entry) -> dict[str, Any]:
    reward = entry.reward or {}
    return {
        "reward": reward.get("reward"),
        "reward_components": reward.get("components", {}),
        "reward_metadata": reward.get("metadata", {}),
    }


def _models(entry: Entry) -> dict[str, str | None]:
    """The model of each turn, as far back as the history goes."""
    return {row["turn_id"]: row.get("model") for row in entry.turns}  # older rows have none


def _model(turn: KeptTurn, model_of: dict[str, str | None]) -> str | None:
    """The history has the choices of a turn as one."""
    return model_of.get(turn.turn_id) or model_of.get(turn.turn_id.rpartition("/")[0])


def _turn(turn: KeptTurn, model_of: dict[str, str | None]) -> dict[str, Any]:
    mask = np.zeros(turn.num_new + turn.num_output, np.int8)
    mask[turn.num_new :] = 1
    return {
        "turn_id": turn.turn_id,
        "model": _model(turn, model_of),
        "parent": turn.parent,
        "num_before": turn.num_before,
        "prompt_ids": turn.new_ids.numbers,
        "output_ids": turn.output_ids.numbers,
        "logprobs": turn.logprobs,
        "loss_mask": mask,
        "versions": [{"version": each.version, "start": each.start, "end": each.end} for each in turn.versions],
        "finish_reason": turn.finish_reason,
        "ended_at": turn.ended_at,
    }


def _sequence(branch: Branch, model_of: dict[str, str | None]) -> dict[str, Any]:
    ids = all_ids(branch.turns).numbers
    mask = np.zeros(len(ids), np.int8)
    versions, boundaries = [], []
    for number, turn in enumerate(branch.turns):
        start, is_repeated = turn.num_before + turn.num_new, number < branch.num_repeated
        if not is_repeated:
            mask[start : turn.num_tokens] = 1
        versions += [
            {"version": span.version, "start": start + span.start, "end": start + span.end} for span in turn.versions
        ]
        boundaries.append(
            {
                "turn_id": turn.turn_id,
                "model": _model(turn, model_of),
                "prompt_start": turn.num_before,
                "output_start": start,
                "end": turn.num_tokens,
                "finish_reason": turn.finish_reason,
                "ended_at": turn.ended_at,
                "is_repeated": is_repeated,
            }
        )
    return {
        "prompt_length": boundaries[0]["output_start"] if boundaries else 0,
        "finish_reason": branch.turns[-1].finish_reason if branch.turns else None,
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": _logprobs(branch.turns, len(ids)),
        "versions": versions,
        "turns": boundaries,
    }


def _logprobs(turns: list[KeptTurn], num_tokens: int) -> NDArray[np.float32] | None:
    """The log-probability of each token, 0 if it was not generated; None unless they are known for all generated
    tokens.
    """
    aligned = np.zeros(num_tokens, np.float32)
    for turn in turns:
        if turn.logprobs is None:
            return None
        aligned[turn.num_before + turn.num_new : turn.num_tokens] = turn.logprobs
    return aligned
