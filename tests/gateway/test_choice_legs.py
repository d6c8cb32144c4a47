"""Legs of one turn's choices, side by side."""

from gateway.turns.choice_leg import run_all


async def test_a_turn_whose_choices_have_all_ended_needs_no_further_leg() -> None:
    """Its engine may be lost in the moment in which the last of them ended: it has its answer, and got three more legs
    in vain before."""
    await run_all(())
