"""``python -m hippo.cli`` is the same as ``hippo``."""

import sys

from hippo.cli import main

if __name__ == "__main__":
    sys.exit(main())
