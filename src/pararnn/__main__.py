"""`python -m pararnn`: the command line, where no `pararnn` is on the PATH."""

import sys

from pararnn.lab.cli import main

sys.exit(main())
