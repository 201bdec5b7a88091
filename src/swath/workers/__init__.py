"""Processes that run rollouts: talked to, watched, started again. (What any process needs is in ``swath.process``.)

=============  ======================================================================================
file           what it knows
=============  ======================================================================================
layout.py      which env goes into which worker
process.py     where the process begins and ends
worker.py      what runs in it: envs, a policy, and orders to follow
orders.py      what a worker and its owner say to each other
channel.py     how they say it: messages through a pipe, exceptions among them
pickling.py    what travels by value
memory.py      memory that several processes see
blocks.py      batches in that memory: who writes where, and when a block can be used again
board.py       a page for each worker that its owner reads without asking: where it stands
fair_lock.py   a lock whose waiters have their turns
fleet.py       all workers of a collector: waiting for them, finding out who died, ending them
helper.py      a process that does one thing after another: an Evaluator's, an inference server's
seeding.py     seeds for processes
-------------  --------------------------------------------------------------------------------------
               envs that are stepped for somebody else, who has the policy
stage.py       the memory of their steps: rows, orders, what came of them
signals.py     semaphores in that memory
env_worker.py  what runs in such a worker: envs, and orders to follow
env_hosts.py   where that runs: in processes or in threads
env_crew.py    all of them, as their owner sees them
=============  ======================================================================================
"""
