"""Dataclasses that are never changed, at the price of those that may be.

A turn makes a dozen of them with eighty fields in all, and to set a field takes four times as long where it is frozen.
So the type checker sees to it that nobody changes one, and the interpreter does not look.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool):
        """A decorator, as `dataclass` is: what it makes is equal and hashable by its fields."""
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)


__all__ = ["value_class"]
