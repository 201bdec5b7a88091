"""What there is one of: whoever owns processes, threads or memory that they share is neither copied nor pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from swath.errors import CannotCopy


class NotCopied:
    """A copy would share the insides, and close them for both when it goes."""

    #: For the error: what it has that cannot be there twice, and what to do instead.
    _owns: ClassVar[str] = "threads of its own"
    _instead_of_a_copy: ClassVar[str] = "make another one with the same arguments"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What ``copy``, ``deepcopy``, ``pickle`` and ``cloudpickle`` ask."""
        raise CannotCopy(
            f"{type(self).__name__} cannot be copied, or pickled for another process: it has {self._owns}; "
            f"{self._instead_of_a_copy}"
        )
