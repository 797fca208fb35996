"""`python -m mizzen.cli` is `mizzen`."""

import sys

from mizzen.cli.main import main

sys.exit(main())
