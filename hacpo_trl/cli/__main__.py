"""`python -m hacpo_trl.cli` is the command `hacpo`."""

import sys

from .command import main

sys.exit(main())
