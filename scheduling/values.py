"""Dataclasses that are never changed, at the cost of mutable ones.

A turn makes a dozen of them, with eighty fields in all, and setting a field takes four times as long if the class is
frozen. So the type checker ensures that they do not change, and the interpreter does not check.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool):
        """A decorator like `dataclass`: instances are equal and hashable by their fields."""
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)


__all__ = ["value_class"]
