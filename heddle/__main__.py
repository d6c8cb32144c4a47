"""`python -m heddle`."""

import sys

from heddle.cli import main

sys.exit(main())
