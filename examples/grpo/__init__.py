"""A small GRPO trainer: agents play through the gateway, the trainer learns from their tokens, and the fleet gets its
weights.
"""
