"""The network of the text predictor. The only file that uses torch, which is optional: the extra `text`.

A convolution over hashed words, pooled separately over a conversation's head and tail, plus a few numbers. The output
is the mean and the spread of the log of the remaining output. Small enough to train on a CPU in a minute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

HEAD_WORDS, TAIL_WORDS = 128, 256
NUM_NUMBERS = 4
_NUM_HASHES = 16_384
_WIDTH = 32
_MIN_SPREAD, _MAX_SPREAD = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One example as numbers: hashed words, further numbers, and the log that the network's output is added to."""

    words: list[int]
    numbers: list[float]
    base_log: float
    log_left: float = 0.0


Modules = Any

# The other cores belong to the gateway and its engines, and threads that wait for each other on a busy machine are
# slow.
torch.set_num_threads(1)


def new_modules(seed: int) -> Modules:
    """An untrained network."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "words": nn.Embedding(_NUM_HASHES, _WIDTH, padding_idx=0),
            "phrases": nn.Conv1d(_WIDTH, _WIDTH, kernel_size=3, padding=1),
            "joined": nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * _WIDTH + NUM_NUMBERS, 48), nn.ReLU()),
            "law": nn.Linear(48, 2),
        }
    )


def hash_of(word_checksum: int) -> int:
    """The word's row in the table; row 0 means no word."""
    return word_checksum % (_NUM_HASHES - 1) + 1


def train(
    modules: Modules, rows: Sequence[Row], held_out: Sequence[Row], max_epochs: int, is_time_up: Callable[[], bool]
) -> None:
    """Fit to `rows`; keep the state with the least loss on `held_out` (nats per example)."""
    optimizer = torch.optim.AdamW(modules.parameters(), lr=2e-3, weight_decay=0.02)
    best, best_loss, best_epoch = _state(modules), _loss_of(modules, held_out), 0
    for epoch in range(1, max_epochs + 1):
        modules.train()
        order = torch.randperm(len(rows)).tolist()
        for start in range(0, len(order), 64):
            loss = _loss(modules, [rows[index] for index in order[start : start + 64]])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
            optimizer.step()
        if (loss_now := _loss_of(modules, held_out)) < best_loss:
            best, best_loss, best_epoch = _state(modules), loss_now, epoch
        if epoch - best_epoch >= 3 or is_time_up():
            break
    modules.load_state_dict(best)


def laws(modules: Modules, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(mean, spread) of the log of the output left, for each row."""
    modules.eval()
    with torch.inference_mode():
        means, spreads = _forward(modules, rows)
    return list(zip(means.tolist(), spreads.tolist(), strict=True))


def save(modules: Modules, about: dict[str, float], path: Path) -> None:
    """Write the network and numbers about it."""
    torch.save({"about": about, "state": modules.state_dict()}, path)


def load(path: Path) -> tuple[Modules, dict[str, float]]:
    """What `save` wrote. Raises OSError or ValueError. Only tensors and numbers are read: a file cannot run code."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        modules = new_modules(0)
        modules.load_state_dict(saved["state"])
        return modules, {str(key): float(value) for key, value in saved["about"].items()}
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a text predictor: {type(error).__name__}") from error


def _forward(modules: Modules, rows: Sequence[Row]) -> tuple[Any, Any]:
    words = torch.tensor([row.words for row in rows])
    numbers = torch.tensor([row.numbers for row in rows], dtype=torch.float32)
    base = torch.tensor([row.base_log for row in rows], dtype=torch.float32)
    phrases = torch.relu(modules["phrases"](modules["words"](words).transpose(1, 2)))
    phrases = phrases * (words != 0).unsqueeze(1)
    pools = [phrases[:, :, :HEAD_WORDS].amax(2), phrases[:, :, HEAD_WORDS:].amax(2)]
    law = modules["law"](modules["joined"](torch.cat([*pools, numbers], dim=1)))
    return base + law[:, 0], nn.functional.softplus(law[:, 1]).clamp(_MIN_SPREAD, _MAX_SPREAD)


def _loss(modules: Modules, rows: Sequence[Row]) -> Any:
    """Negative log-likelihood of a normal distribution of logs."""
    means, spreads = _forward(modules, rows)
    truth = torch.tensor([row.log_left for row in rows], dtype=torch.float32)
    return (((truth - means) / spreads) ** 2 / 2 + spreads.log()).mean()


def _loss_of(modules: Modules, rows: Sequence[Row]) -> float:
    modules.eval()
    with torch.inference_mode():
        batches = [rows[start : start + 256] for start in range(0, len(rows), 256)]
        return float(sum(_loss(modules, batch) * len(batch) for batch in batches) / len(rows))


def _state(modules: Modules) -> dict[str, Any]:
    return {name: value.clone() for name, value in modules.state_dict().items()}
