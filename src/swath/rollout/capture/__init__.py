"""Capture: a policy's call recorded once, and run again as a flat list of operations on the same memory.

====================  ==================================================================================
``recording.py``      one real call: which operations ran, which Python code ran
``watch.py``          what that code may have read: whether any of it has changed since
``program.py``        the operations that matter, in an order in which nothing is done before it is known to be right
``lowering.py``       an operation as the cheapest call that writes to its recorded result
``rewrites.py``       sampling and its checks, written out
``captured.py``       when to record, when to trust, when to call the policy as it is
====================  ==================================================================================

Python's control flow is not captured, so it must be known that it would go the same way: everything that the executed
code may have read is watched (attributes, globals, cells, containers, tensors), every value of a tensor that decided
something is compared with the recorded one in each step, and what is neither is refused: the policy is called as it is.
"""
