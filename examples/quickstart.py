"""Two tiny agents learn arithmetic together, on a CPU: the command `hacpo quickstart`, from a clone.

    python examples/quickstart.py [--rounds 24] [--output_dir quickstart_out]

The code is hacpo_trl/cli/quickstart.py.
"""

import sys

from hacpo_trl.cli.console import start_quietly

start_quietly()

from hacpo_trl.cli.quickstart import main

if __name__ == "__main__":
    sys.exit(main())
