"""Rollouts in other processes: what is asked of them, where their frames go, and what runs there.

=================  ==================================================================================
file               what it knows
=================  ==================================================================================
requests.py        what a worker and its owner say to each other
host.py            the collectors of a worker or a node, and what is asked of them; it knows no way in or out
worker.py          what runs in a worker's process: a host, a pipe, blocks of memory, and requests to follow
blocks.py          batches in shared memory: who writes where, and when a block can be used again
=================  ==================================================================================
"""
