"""Scenarios that `heddle simulate` plays by name, one TOML file each."""
