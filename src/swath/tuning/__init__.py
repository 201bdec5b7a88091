"""Which collector, with how many envs in how many workers: measured, predicted, tried.

``swath tune`` on the command line does the same.
"""

from swath.costs.arrangement import Arrangement, Form
from swath.costs.costs import Costs, Turn
from swath.tuning.tuner import tune
from swath.tuning.tuning import Trial, Tuning

__all__ = ["Arrangement", "Costs", "Form", "Trial", "Tuning", "Turn", "tune"]
