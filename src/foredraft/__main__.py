"""``python -m foredraft``: the command line."""

import sys

from foredraft.cli import main

sys.exit(main())
