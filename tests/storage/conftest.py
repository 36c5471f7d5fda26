"""The scripts of ``storage/`` import each other from their own folder; so do their tests."""

import sys
from pathlib import Path

STORAGE = Path(__file__).parents[2] / "storage"
sys.path.insert(0, str(STORAGE))
