"""Dual numbers: a simulation that adds and multiplies times computes their derivatives on the way, exactly.

It plays as it would with plain numbers, because comparisons see only the values, so the derivatives hold as long as
everything happens in the same order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slopes = NDArray[np.float64]


class Dual(float):
    """A value, and its derivatives by some variables, in their order. Only sums, differences, products and quotients
    have derivatives; what anything else makes of it (`float`, `math.sqrt`, `//`) is a plain number.
    """

    __slots__ = ("slopes",)
    slopes: Slopes

    def __add__(self, other: float) -> "Dual":
        slopes = self.slopes + other.slopes if isinstance(other, Dual) else self.slopes
        return _dual(float.__add__(self, other), slopes)

    __radd__ = __add__

    def __sub__(self, other: float) -> "Dual":
        slopes = self.slopes - other.slopes if isinstance(other, Dual) else self.slopes
        return _dual(float.__sub__(self, other), slopes)

    def __rsub__(self, other: float) -> "Dual":
        return _dual(float.__rsub__(self, other), -self.slopes)

    def __mul__(self, other: float) -> "Dual":
        if isinstance(other, Dual):
            return _dual(float.__mul__(self, other), self.slopes * float(other) + other.slopes * float(self))
        return _dual(float.__mul__(self, other), self.slopes * other)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> "Dual":
        quotient = float.__truediv__(self, other)
        slopes = self.slopes - quotient * other.slopes if isinstance(other, Dual) else self.slopes
        return _dual(quotient, slopes / float(other))

    def __rtruediv__(self, other: float) -> "Dual":
        quotient = float.__rtruediv__(self, other)
        return _dual(quotient, -quotient / float(self) * self.slopes)


def variables(values: Sequence[float]) -> list[Dual]:
    """The variables themselves: each has the derivative 1 by itself and 0 by the others."""
    return [_dual(value, slopes) for value, slopes in zip(values, np.eye(len(values)), strict=True)]


def slopes_of(value: float, num_variables: int) -> Slopes:
    """The derivatives of a result; zeros if no variable took part in it."""
    return value.slopes if isinstance(value, Dual) else np.zeros(num_variables)


def _dual(value: float, slopes: Slopes) -> Dual:
    made = Dual(value)
    made.slopes = slopes
    return made
