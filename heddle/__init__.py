"""The command `heddle`: assembles processes."""
