"""How much work a trajectory has left."""
