"""Traces whose siblings share long prompts can be loaded, and are of the shape asked for."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from workloads.long_prompts import SHAPES, lines
from workloads.traces import load_trace


@pytest.mark.parametrize("name", SHAPES)
def test_a_trace_has_its_shape(name: str, tmp_path: Path) -> None:
    """Groups as large as asked for, each with one prompt; one seed gives one trace."""
    shape, path = SHAPES[name], tmp_path / "trace.jsonl"
    written = [*lines(shape, 1)]
    assert written == [*lines(shape, 1)] != [*lines(shape, 2)]
    path.write_text("\n".join(map(json.dumps, written)))
    trajectories = load_trace(path).trajectories
    assert list(Counter(one.group_id for one in trajectories).values()) == [shape.group_size] * shape.num_groups
    prompts = {(one.group_id, one.context_tokens) for one in trajectories}
    assert len(prompts) == shape.num_groups
    assert fmean(tokens for _, tokens in prompts) == pytest.approx(shape.prompt_tokens, rel=0.1)
    assert fmean(one.output_tokens for one in trajectories) == pytest.approx(shape.output_tokens, rel=0.5)
