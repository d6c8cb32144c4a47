"""Conversations written for tests: in one corpus the text tells a trajectory's length, in the other it does not.

No corpus of real conversations with their lengths is at hand. This one shows that a text predictor learns what there is
to learn, and nothing when there is nothing. It does not show what real text is worth.
"""

import math
import random

from predictor.text import TextExample

_TASKS = {
    "rename a variable": -1.2,
    "fix a typing mistake": -0.8,
    "add a missing test": -0.2,
    "repair the flaky build": 0.3,
    "port the parser": 0.8,
    "rewrite the storage engine": 1.3,
}
_FILLER = (
    "please",
    "carefully",
    "keep",
    "style",
    "clean",
    "module",
    "with",
    "tests",
    "docs",
    "before",
    "each",
    "small",
)
_SPREAD_UNTOLD = 0.4


def corpus(num_groups: int, has_signal: bool, seed: int) -> list[TextExample]:
    """Two siblings of each group, each at its first turn and at a later one.

    Both corpora have the same law of lengths. Without a signal, task and logs are drawn independently of the length.
    """
    rng = random.Random(seed)
    examples = []
    for number in range(num_groups):
        task = rng.choice(list(_TASKS))
        told_task = task if has_signal else rng.choice(list(_TASKS))
        prompt = f"user\n{_filler(rng, 30)} {told_task} {_filler(rng, 30)}"
        for _ in range(2):
            surprise = rng.gauss(0, 0.6)
            total = round(math.exp(8 + _TASKS[task] + surprise + rng.gauss(0, _SPREAD_UNTOLD)))
            group_id = f"{seed}-{number}"
            examples.append(TextExample(prompt, group_id, 0, 0, total))
            told_surprise = surprise if has_signal else rng.gauss(0, 0.6)
            log = f"tool\n{_filler(rng, 20)}\n{_test_report(rng, told_surprise)}"
            made = max(1, round(total * rng.uniform(0.05, 0.3)))
            examples.append(TextExample(f"{prompt}\nassistant\n{_filler(rng, 20)}\n{log}", group_id, made, 2, total))
    return examples


def _filler(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_FILLER) for _ in range(num_words))


def _test_report(rng: random.Random, surprise: float) -> str:
    state = "regression again" if surprise > 0.3 else "all green now" if surprise < -0.3 else "some progress"
    return f"{state}, {rng.randrange(100)} lines read"
