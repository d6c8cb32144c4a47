"""The tokens of turns that have ended, kept for later turns and for trainers."""
