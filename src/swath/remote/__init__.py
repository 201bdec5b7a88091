"""Rollouts in other processes: what is asked of them, where their frames go, and what runs there.

=================  ==================================================================================
file               what it knows
=================  ==================================================================================
requests.py        what a worker and its owner say to each other
worker.py          what runs in it: envs, a policy, and requests to follow
blocks.py          batches in shared memory: who writes where, and when a block can be used again
=================  ==================================================================================
"""
