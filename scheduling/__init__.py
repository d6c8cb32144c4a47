"""Pure decisions: when each turn runs and where each trajectory lives. No clock, randomness, sockets or logging."""
