"""Ray: imported only where it is asked for, and started with settings that suit a laptop."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from swath.addresses import LOOPBACK, is_loopback
from swath.warn import warn_user

#: Of a cluster that swath starts itself. Replies up to ``max_direct_call_object_size`` go straight to the driver,
#: without a detour over the object store's process.
DEFAULT_RAY_INIT_CONFIG: dict[str, Any] = {
    "include_dashboard": False,
    "_node_ip_address": LOOPBACK,
    "_system_config": {"max_direct_call_object_size": 1_000_000},
    "logging_level": "warning",
}


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ImportError("this needs Ray: pip install 'swath[ray]'") from None
    return ray


def start_ray(config: Mapping[str, Any] | None) -> bool:
    """Connect to Ray, or start it; whether it was started here, and is to be ended here."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    config = dict(config or {})
    address = config.get("address") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        _warn_if_open(address)
        ray.init(**config)
        return True
    ray.init(**{**copy.deepcopy(DEFAULT_RAY_INIT_CONFIG), **config})  # Ray writes into what it is given
    return True


def _warn_if_open(address: str) -> None:
    host = address.removeprefix("ray://").rpartition(":")[0] or address
    if host != "auto" and not is_loopback(host) and not has_token_authentication():
        warn_user(
            f"the Ray cluster at {address} takes orders from whoever reaches it: start it, and this program, with "
            "RAY_AUTH_MODE=token (and see `ray get-auth-token`)"
        )


def has_token_authentication() -> bool:
    try:
        from ray._raylet import AuthenticationMode, get_authentication_mode

        return get_authentication_mode() != AuthenticationMode.DISABLED
    except ImportError:  # another version of Ray
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
