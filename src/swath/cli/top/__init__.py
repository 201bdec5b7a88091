"""``swath top``: programs that collect, seen from another terminal.

==========  ====================================================================
file        what it knows
==========  ====================================================================
command.py  the command: once, as JSON, or in a terminal until somebody leaves
watched.py  programs with their histories, and those that have gone
drawing.py  the whole view of one, a line each of several
as_json.py  what scripts get
keys.py     the terminal: its keys, and leaving it as it was
==========  ====================================================================

Nothing of it imports torch.
"""

EPILOG = """\
examples:
  swath top                 every program with an open collector; of one, all that is known
  swath top 12345           that of process 12345
  swath top --once          print it, and leave
  swath top --json          for scripts: {"programs": [{"pid": ..., "collectors": [{"reading": ...}]}]}

Programs need no change. It sees those of your user on this machine (or in this container); nobody else does."""
