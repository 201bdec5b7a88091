"""What Slurm is asked for, where scripts for TorchRL import it from. (Their values are another matter.)"""

import os

from swath.collectors.distributed.launchers import DEFAULT_SLURM_CONF

#: Of the job that the launcher starts, which trains: as ``DEFAULT_SLURM_CONF``, with a GPU.
DEFAULT_SLURM_CONF_MAIN = {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}
#: For ``tcp_port=``; the environment variable of this name says another.
TCP_PORT = os.environ.get("TCP_PORT", "10003")

__all__ = ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN", "TCP_PORT"]
