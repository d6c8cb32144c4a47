"""Virtual time around the very same scheduler: what it would do on a fleet that nobody has to pay for."""
