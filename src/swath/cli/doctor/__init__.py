"""``swath doctor``: the machine and the set-up, what is wrong with them, and what mends it.

=============  =======================================================================================
file           what it knows
=============  =======================================================================================
command.py     the command: runs the probes, prints what they found, the exit code
findings.py    what a probe is, and what it finds; probes that fail or hang are findings, too
machine.py     system, cores, memory, shared memory, descriptors, processes, folders
packages.py    versions of what is installed, and of what swath supports
cluster.py     Ray, without starting it
trial.py       what only torch knows, and a real worker: asked of a process that may crash or hang
trial_child.py that process
=============  =======================================================================================

A probe gathers facts (a frozen dataclass), and a function of nothing but these facts says what follows.
"""

EPILOG = """\
Each line is one thing; where something is wrong, what follows from it, and the
command that mends it. It starts a worker for a moment, and no cluster.

exit codes:
  0    nothing would make collecting fail (there may be warnings)
  1    something would
"""
