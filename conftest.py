"""Modules behind extras that CI does not install have no doctests to collect there."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["dshuffle/integrations/torch.py"]
