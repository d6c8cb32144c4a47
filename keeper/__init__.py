"""Keeps a command running, and its file descriptors past its end. Standard library only: it must outlive all else."""
