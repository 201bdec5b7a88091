"""What swath raises.

SwathError
├── EnvError (RuntimeError)              the env broke its contract
│   ├── EnvDataError (ValueError)        … by a key, shape or dtype that differs from its layout
│   └── EnvClosed                        … or was used after close()
├── PolicyError (RuntimeError)           the policy broke its contract
│   ├── PolicyInputError (KeyError)      … it asks for a key that nobody writes
│   └── PolicyOutputError (ValueError)   … it returned nothing, or something that does not fit
├── NonFiniteData (FloatingPointError)   check_finite=True met a NaN or an infinity
├── CollectorClosed (RuntimeError)       the collector was used after shutdown()
└── NoLength (RuntimeError, TypeError)   len() of a collector that cannot know it

An exception that a user's env or policy raises is not wrapped: it keeps its type, and a note
(``exception.__notes__``) says which env, which step and what to do.
"""

from __future__ import annotations

__all__ = [
    "CollectorClosed",
    "EnvClosed",
    "EnvDataError",
    "EnvError",
    "NoLength",
    "NonFiniteData",
    "PolicyError",
    "PolicyInputError",
    "PolicyOutputError",
    "SwathError",
]


class SwathError(Exception):
    """The root of everything that swath raises itself."""


class EnvError(SwathError, RuntimeError):
    """An env broke its contract."""


class EnvDataError(EnvError, ValueError):
    """An env delivered a key, shape or dtype that differs from its layout."""


class EnvClosed(EnvError):
    """An env was used after ``close()``."""


class PolicyError(SwathError, RuntimeError):
    """A policy broke its contract."""


class PolicyInputError(PolicyError, KeyError):
    """A policy asks for a key that neither the env nor the policy itself writes."""

    __str__ = Exception.__str__  # KeyError would show the message as a repr


class PolicyOutputError(PolicyError, ValueError):
    """A policy returned nothing, or something that does not fit its layout."""


class NonFiniteData(SwathError, FloatingPointError):
    """``check_finite=True`` met a NaN or an infinity."""


class CollectorClosed(SwathError, RuntimeError):
    """A collector was used after ``shutdown()``."""


class NoLength(SwathError, RuntimeError, TypeError):
    """``len()`` of a collector that cannot know it; a TypeError, so that ``list`` and ``tqdm`` go on without."""
