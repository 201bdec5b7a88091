"""What is made of batches, under the name that it has in TorchRL."""

from swath.data.trajectories import split_trajectories

__all__ = ["split_trajectories"]
