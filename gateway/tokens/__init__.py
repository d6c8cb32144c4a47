"""The tokens of ended turns, kept for later turns and for trainers."""
