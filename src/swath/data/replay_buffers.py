"""``swath.data`` under the name by which TorchRL's scripts know it."""

from swath.data import *  # noqa: F403
