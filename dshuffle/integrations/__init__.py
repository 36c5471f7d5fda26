"""Adapters to optional libraries. Import each module directly; some need an extra."""

INSTALL_TORCH = (
    "Run: pip install 'dshuffle[torch]'. For processors alone, first run: pip install torch --index-url "
    "https://download.pytorch.org/whl/cpu"
)
"""How to install PyTorch. From PyPI it comes with gigabytes of packages for GPUs."""
