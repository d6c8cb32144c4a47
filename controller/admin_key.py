"""The secret that gateway, controller and operators share. A module of its own, because a command that only sends the
secret starts four times as fast without the rest of the fleet file."""

ADMIN_KEY_VARIABLE = "HEDDLE_ADMIN_KEY"


def check_key(key: str) -> None:
    """Raises ValueError, which does not tell the key, if no header can carry it as it is."""
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError("must be printable ASCII, without spaces or line ends around it")
