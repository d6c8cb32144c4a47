"""Predicts how much work a trajectory has left."""
