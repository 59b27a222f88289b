"""``python -m tileops``: the command line, see tileops.cli."""

import sys

if __name__ == "__main__":
    from tileops.cli import main

    sys.exit(main())
