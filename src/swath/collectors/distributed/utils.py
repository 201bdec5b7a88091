"""The launcher of a main job, where scripts for TorchRL import it from, too."""

from swath.collectors.distributed.launchers import submitit_delayed_launcher

__all__ = ["submitit_delayed_launcher"]
