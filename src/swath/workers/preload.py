"""Imported by the server that worker processes are forked from, and nowhere else: what every worker needs.

Many workers on few cores: each computes with one thread (``num_sub_threads`` says otherwise for torch). Libraries read
these variables when they are loaded.
"""

import os
import signal
import sys

# Whoever imports this elsewhere (a tool that looks at every module) must not have its process changed.
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, also while this is imported
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import gymnasium  # noqa: F401
import tensordict  # noqa: F401
import torch  # noqa: F401

import swath.collectors
import swath.envs
import swath.workers.env_worker
import swath.workers.worker  # noqa: F401
