"""Keys that are sent in a header: those of engines, of a gateway's clients and of operators."""


def check_key(key: str) -> None:
    """Raises ValueError, which does not tell the key, if no header can carry it as it is."""
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError("must be printable ASCII, without spaces or line ends around it")
