"""The weights of the engines: which they must have, updates while turns run, and tokens of old ones."""
