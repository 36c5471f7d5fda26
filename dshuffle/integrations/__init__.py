"""Adapters to optional libraries. Import each module directly; some need an extra."""

import sys
from typing import Any

INSTALL_TORCH = (
    "Run: pip install 'dshuffle[torch]'. For processors alone, first run: pip install torch --index-url "
    "https://download.pytorch.org/whl/cpu"
)
"""How to install PyTorch. From PyPI it comes with gigabytes of packages for GPUs."""


def process_group() -> Any:
    """``torch.distributed``, if the script has made its process group; otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    made = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if made else None
