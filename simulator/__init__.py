"""The scheduler that ships, in virtual time: what it would do on a fleet that nobody has to pay for."""
