"""Modules behind extras that CI does not install have no doctests to collect there."""

import importlib.util

WITH_TORCH = ["dshuffle/integrations/torch.py", "dshuffle/training/torch_ddp.py"]
collect_ignore = [] if importlib.util.find_spec("torch") else WITH_TORCH
