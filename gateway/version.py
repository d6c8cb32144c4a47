"""The version of Heddle that is installed; pyproject.toml has it."""

from importlib.metadata import version

VERSION = version("heddle")
