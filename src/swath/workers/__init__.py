"""Processes that are told what to do: started, talked to, watched, started again. (Any process: ``swath.process``.)

===============  ====================================================================================
file             what it knows
===============  ====================================================================================
spec.py          what a worker is made from, and what differs when it is started again
layout.py        which env goes into which worker
process.py       where the process begins and ends
status_page.py   a page for each worker that its owner reads without asking: where it stands
pool.py          all workers of one owner: waiting for them, finding out who died, ending them
===============  ====================================================================================
"""
