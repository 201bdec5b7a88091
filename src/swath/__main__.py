"""``python -m swath``: the command line."""

import sys

from swath.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
