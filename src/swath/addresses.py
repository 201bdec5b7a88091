"""Addresses: what is listened on, and who may hear it."""

from __future__ import annotations

import ipaddress
import socket

from swath.warn import warn_user

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(resolve(address)).is_loopback
    except (OSError, ValueError):
        return False


def resolve(address: str) -> str:
    return str(socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def warn_if_open(address: str, secret: str | None, who: str, advice: str) -> None:
    if not is_loopback(address) and not secret:
        warn_user(f"{who} listens on {address}, and whoever reaches it can take part: {advice}")


def listen(address: str, port: int) -> socket.socket:
    """A socket for a store, on this address only (the store by itself would take all)."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((resolve(address), port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        error.add_note(f"swath: cannot listen on {address}:{port}; give another tcp_port, or 0 for one that is free")
        raise
    return listening


def own_address(peer: str, port: int) -> str:
    """The address of this machine that a peer can reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolve(peer), port or 9))
        return probe.getsockname()[0]
