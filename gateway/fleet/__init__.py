"""The engines as this process sees them, and their weights."""
