"""Processes of this machine: started, watched and ended, whatever runs in them.

============  =======================================================================================
file          what it knows
============  =======================================================================================
start.py      how a process starts (a server that forks, a new interpreter, a fork)
owner.py      in a process: when its owner is gone, it leaves
supervise.py  in the owner: whether a process has ended, and how; ending it; what is ended at exit
ctrl_c.py     when Ctrl-C may come: not in the middle of a message, or of the books
============  =======================================================================================
"""
