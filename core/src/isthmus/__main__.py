"""`python -m isthmus`: the `isthmus` command."""

import sys

from isthmus.cli import main

if __name__ == "__main__":
    sys.exit(main())
