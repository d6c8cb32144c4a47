"""The command `heddle`: puts processes together."""
