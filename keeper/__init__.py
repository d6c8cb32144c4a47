"""Keeps a command running, and its file descriptors beyond its end. Standard library only: it must outlive everything
else."""
