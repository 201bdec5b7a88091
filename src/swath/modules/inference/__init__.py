"""One policy for many actors.

=================  ==============================================================================
file               what it knows
=================  ==============================================================================
service.py         PolicyService: what every server offers
server.py          InferenceServer: what the user asked for, and the thread's life
loop.py            waiting, forming batches, answering
served_policy.py   the policy: its weights, its version, how it is called on many requests' rows
requests.py        what a request is
transport.py       what every transport has
threads.py         clients in the server's own process
reception.py       how clients of other processes come in
pipes.py           clients in other processes that send whatever can be pickled
slots.py           clients in other processes that write into slots of shared memory
client.py          what every client has, and futures
policy_client.py   PolicyClientModule: a client as a policy
process_server.py  ProcessInferenceServer: the same server in a process of its own
stats.py           what is counted
=================  ==============================================================================
"""
