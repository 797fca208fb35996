"""`bench` lies beside `src` and is not installed: these tests import it from the repository."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
