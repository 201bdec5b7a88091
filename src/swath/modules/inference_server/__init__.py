"""One policy for many actors.

==================  =============================================================================
file                what it knows
==================  =============================================================================
config.py           what a server was asked for
service.py          PolicyService: what every server offers
server.py           InferenceServer: a server that is a thread
process_server.py   ProcessInferenceServer: the same in a process of its own
ray_server.py       RayInferenceServer: the same in a Ray actor
backends.py         which of the three
loop.py             waiting, forming batches, answering
served_policy.py    the policy: its weights, its version, how it is called on many requests' rows
received_weights.py weights that a scheme brings
requests.py         what a request is
futures.py          the answers to what was submitted
transport.py        what every transport has, and those of users
user_transport.py   a user's transport, as the loop sees it
choosing.py         transports by name
threads.py          clients in the server's own process
reception.py        how clients of other processes come in
pipes.py            clients in other processes that send whatever can be pickled
slots.py            clients in other processes that write into slots of shared memory
fixed_slots.py      the same, for requests that are declared
ray_transport.py    clients anywhere in a Ray cluster, of a server that is no actor
ray_client.py       what asks an actor
client.py           what every client has
policy_client.py    PolicyClientModule: a client as a policy
stamp.py            an interaction type inside of a request
waiter_threads.py   threads that wait for answers
stats.py            what is counted
==================  =============================================================================
"""

from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.config import InferenceDeviceConfig, InferenceServerConfig
from swath.modules.inference_server.fixed_slots import ProcessSlotTransport, SharedMemoryTransport
from swath.modules.inference_server.futures import InferenceFuture
from swath.modules.inference_server.pipes import MPTransport
from swath.modules.inference_server.policy_client import PolicyClientModule
from swath.modules.inference_server.process_server import ProcessInferenceServer
from swath.modules.inference_server.ray_server import RayInferenceServer
from swath.modules.inference_server.ray_transport import RayTransport
from swath.modules.inference_server.server import InferenceServer
from swath.modules.inference_server.slots import SlotTransport
from swath.modules.inference_server.threads import ThreadingTransport
from swath.modules.inference_server.transport import InferenceTransport, Transport

__all__ = [
    "InferenceClient",
    "InferenceDeviceConfig",
    "InferenceFuture",
    "InferenceServer",
    "InferenceServerConfig",
    "InferenceTransport",
    "MPTransport",
    "PolicyClientModule",
    "ProcessInferenceServer",
    "ProcessSlotTransport",
    "RayInferenceServer",
    "RayTransport",
    "SharedMemoryTransport",
    "SlotTransport",
    "ThreadingTransport",
    "Transport",
]
