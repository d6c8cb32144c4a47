"""The engines as this process sees them."""
