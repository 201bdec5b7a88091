"""Processes of this machine: started, watched and ended, whatever runs in them.

===============  ======================================================================================
file             what it knows
===============  ======================================================================================
start.py         how a process starts (a server that forks, a new interpreter, a fork)
owner.py         in a process: when its owner is gone, it leaves
supervise.py     in the owner: whether a process has ended, and how; ending it; what is ended at exit
ctrl_c.py        when Ctrl-C may come: not in the middle of a message, or of the books
channel.py       messages through a pipe, exceptions and descriptors among them
pickling.py      what travels by value
cgroups.py       what control groups allow: cores, memory, processes
memory_files.py  files in memory, without a name: what such memory is made of
memory.py        memory that several processes see
semaphores.py    semaphores in that memory
fair_lock.py     a lock whose waiters have their turns
helper.py        a process that does one thing after another: an Evaluator's, an inference server's
late_actor.py    the same in a Ray actor, where the user's function comes before all imports
seeding.py       seeds for processes
===============  ======================================================================================
"""
