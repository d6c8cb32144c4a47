"""Pure decisions: when each turn runs, where each trajectory lives. No clock, dice, sockets or logging."""
