"""Derivatives that a computation carries with it, against differences of that computation with plain numbers."""

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dual import Dual, slopes_of, variables

OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)
# Each step combines two of the numbers so far, of which the first three are plain and the next two variables.
Program = list[tuple[int, int, int]]
PLAIN = (2, 0.5, -3.0)


def result(program: Program, inputs: Sequence[float]) -> float:
    numbers: list[float] = [*PLAIN, *inputs]
    for operation, left, right in program:
        numbers.append(OPERATIONS[operation](numbers[-1 - left % len(numbers)], numbers[-1 - right % len(numbers)]))
    return numbers[-1]


@given(
    program=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    inputs=st.tuples(st.floats(0.5, 4.0), st.floats(0.5, 4.0)),
)
def test_derivatives_are_the_limits_of_differences(program: Program, inputs: tuple[float, float]) -> None:
    """Of sums, differences, products and quotients, of variables and of plain numbers on either side."""
    try:
        plain = result(program, inputs)
    except (ZeroDivisionError, OverflowError):
        return
    found = result(program, variables(inputs))
    assert float(found) == plain
    for index, slope in enumerate(slopes_of(found, 2)):
        shifts = np.eye(2)[index] * 1e-6
        higher, lower = (result(program, tuple(np.add(inputs, sign * shifts).tolist())) for sign in (1, -1))
        if max(abs(higher), abs(lower), abs(slope)) < 1e6:  # else differences tell nothing
            assert slope == pytest.approx((higher - lower) / 2e-6, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("make_plain", [float, math.sqrt, round, lambda value: value // 1.0])
def test_what_else_is_made_of_it_is_plain(make_plain: Callable[[float], float]) -> None:
    """Such a number would have derivatives that nobody computed."""
    (variable,) = variables([2.5])
    assert not isinstance(make_plain(variable), Dual)
    assert slopes_of(make_plain(variable), 1).tolist() == [0.0]
