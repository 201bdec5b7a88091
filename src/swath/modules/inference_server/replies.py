"""What comes back from a server: an answer, an exception, or that there is nobody to answer."""

from __future__ import annotations

from typing import Any

from swath.errors import ServerClosed
from swath.process.channel import unpack


def opened(kind: str, content: Any, who: str = "the inference server") -> Any:
    """The content of a reply; raises it where it is an exception."""
    if kind == "failed":
        raise unpack(content, -1, who)
    return content


def not_started() -> ServerClosed:
    return ServerClosed("the inference server was not started: call server.start(), or use it in a with block")


def was_shut_down() -> ServerClosed:
    return ServerClosed("the inference server was shut down")
