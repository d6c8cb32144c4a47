"""Compiles the scheduler to machine code where HEDDLE_COMPILE=1 asks for it; all else is said in pyproject.toml."""

import os
from pathlib import Path

from setuptools import setup

# Whose decorator is one thing to the type checker and another when it runs, which the compiler cannot know.
INTERPRETED = {"values.py"}


def extensions() -> list[object]:
    """Extension modules beside the sources; none where nobody asks for them."""
    if os.environ.get("HEDDLE_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    paths = [str(path) for path in sorted(Path("scheduling").glob("*.py")) if path.name not in INTERPRETED]
    return list(mypycify(paths, opt_level="2"))


setup(ext_modules=extensions())
