"""`python -m reshard`, the same as the `reshard` command."""

import sys

from reshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
