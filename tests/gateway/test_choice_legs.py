"""Legs of one turn's choices, side by side."""

from gateway.turns.choice_leg import run_all


async def test_run_all_without_legs_returns() -> None:
    """An engine may be lost at the moment when the last choice of its turn ends. The turn, which had its answer, used
    to get three more legs."""
    await run_all(())
