"""Whether a way of training is not worse than a reference by a margin: a paired test with an error rate.

Both runs of a pair share initial weights, augmentation and batch seeds, and differ in the way alone. Pairs are added
until the answer is clear, or until there are as many as the user allows.

References
----------
K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika, 1983: the error rate is
spent look by look. Here it is spent in proportion to the pairs, and the parts are added (Bonferroni), because the joint
distribution of the looks is not known if the variance is not.
"""

from dshuffle.noninferiority.paired_runs import ERROR_RATE, PairedOutcome, PairedRuns
from dshuffle.noninferiority.paired_test import FEWEST_PAIRS, Margin, PairedTest

__all__ = ["ERROR_RATE", "FEWEST_PAIRS", "Margin", "PairedOutcome", "PairedRuns", "PairedTest"]
