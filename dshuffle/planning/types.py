"""Array types of the planning package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]
Ranks = NDArray[np.int32]
Holders = NDArray[np.uint64]
Words = NDArray[np.uint64]
Amounts = NDArray[np.float64]
