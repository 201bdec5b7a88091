"""Envs that are stepped elsewhere, for somebody who has the policy.

=================  ==================================================================================
file               what it knows
=================  ==================================================================================
spec.py            what a worker that only steps is made from, and what it says of itself
shared_steps.py    the memory of their steps: rows, orders, what came of them
env_worker.py      what runs in such a worker: envs, and orders to follow
env_hosts.py       where that runs: in processes or in threads
env_crew.py        all of them, as their owner sees them
central.py         the loop of one policy for whichever are ready
turns.py           which takes how long, its policy or the envs
group_progress.py  how far each group of envs has come in it
=================  ==================================================================================
"""
