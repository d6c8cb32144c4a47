"""The command `heddle`, and `python -m heddle`."""

import sys


def main() -> int:
    """Run the command; an interrupt while it is imported ends it like any other."""
    try:
        from heddle import cli  # a tenth of a second

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
