"""Compiles what decides on every turn to machine code; laid beside pyproject.toml in a copy of the sources, never in a
checkout, where an extension module would stand before the source that somebody changes.
"""

from mypyc.build import mypycify
from setuptools import setup

# No module whose dataclasses are ever encoded (types, limits, cost): orjson reads them by their memory, which in a
# compiled class is another, and the process dies.
COMPILED = (
    "chooser",
    "dispatcher",
    "engine",
    "estimate",
    "idle",
    "order",
    "placement",
    "residency",
    "scheduler",
    "state",
)

setup(ext_modules=mypycify([f"scheduling/{name}.py" for name in COMPILED], opt_level="2"))
