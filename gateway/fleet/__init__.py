"""The engines as this process sees them, and which weights they have."""
