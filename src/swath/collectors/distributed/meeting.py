"""How a driver and a node of torch.distributed meet: where, on which device, and whether both know the secret."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from swath.collectors.distributed.wire import HELLO, Link, proof

#: How often each side says that it is there, before the other gives it up.
PINGS_PER_TIMEOUT = 4


def body_device(backend: str, rank: int) -> torch.device | None:
    if backend != "nccl":
        return None
    if not torch.cuda.is_available():
        raise RuntimeError("backend='nccl' needs CUDA, which this machine (or this build of torch) has not; use 'gloo'")
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_device(address: str) -> Any:
    try:
        return ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError:
        raise ValueError(
            f"address={address!r} is not an address of this machine: give one that nodes can reach it by (`ip addr`)"
        ) from None


def connect_to_store(address: str, port: int, timeout_s: float) -> Any:
    return TCPStore(address, port, None, False, timeout=timedelta(seconds=timeout_s))


# Each side proves to the other that it knows the secret; nobody says it.


def require_secret(link: Link, secret: str, node: int) -> None:
    """The driver's part."""
    nonce = secrets.token_hex(16)
    link.send(HELLO, 0, {"nonce": nonce})
    answer = link.receive().about
    if not secrets.compare_digest(answer["proof"], proof(secret, nonce, f"node{node}")):
        raise PermissionError("it does not know the secret")
    link.send(HELLO, 0, {"proof": proof(secret, answer["nonce"], "driver")})


def prove_secret(link: Link, secret: str, node: int) -> None:
    """The node's part."""
    nonce = secrets.token_hex(16)
    asked = link.receive().about
    link.send(HELLO, 0, {"proof": proof(secret, asked["nonce"], f"node{node}"), "nonce": nonce})
    if not secrets.compare_digest(link.receive().about["proof"], proof(secret, nonce, "driver")):
        raise PermissionError("the driver does not know the secret")
