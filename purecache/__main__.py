"""`python -m purecache` is the same as the command `purecache`."""

import sys

from purecache.cli import main

if __name__ == "__main__":
    sys.exit(main())
