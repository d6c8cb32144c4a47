"""Booleans in requests, as engines read them."""

# What pydantic takes for a boolean; 1 and 0 equal the first of each.
_YES = (True, "1", "t", "true", "y", "yes", "on")
_NO = (False, "0", "f", "false", "n", "no", "off")


def flag_of(value: object) -> bool | None:
    """The boolean that vLLM and SGLang read in a value of a request's JSON; None if they refuse it."""
    if isinstance(value, bool):
        return value
    said = value.lower() if isinstance(value, str) else value
    return True if said in _YES else False if said in _NO else None
