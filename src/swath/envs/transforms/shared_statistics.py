"""Statistics that several processes add to at the same time, without a lock.

Whoever adds has a slot of its own, so nobody waits and nothing is lost; whoever reads puts the slots together. A slot
has several copies of its sums: a new one is written beside the newest and then, by one number, said to be there. So a
process may be killed at any moment: what it said last stays, and whoever comes next goes on in its slot.

Old data may count less (``decay``). Then sums are worth what they were worth at some time, counted in additions of all
processes together, and are brought to the present when they are put together.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from swath import platforms
from swath.errors import EnvError
from swath.keys import Key
from swath.process.memory import map_descriptor
from swath.process.memory_files import new_descriptor

#: Room for what is said about the slots; pages that nobody writes take none.
_HEADER_BYTES = 1 << 16
_TOKEN_BYTES = 16
#: 64-bit words of the header: how long the description is (0: there is none yet), and how many slots were ever used.
_TEXT_LENGTH, _NUM_USED = 2, 3
_TEXT_AT = 64
#: Copies of the sums of a slot. A reader is safe until its copy is written again: two additions of one process may come
#: while it reads.
_COPIES = 4
#: In front of the sums: which load they are of, how many additions they have, and at what time.
_EPOCH, _ADDED, _TIME, _HEAD = 0, 1, 2, 3
#: The first slot is for what was loaded.
_LOADED = 0
#: A byte of the file (behind all that is there) is locked for each slot that is taken, and one for changes of the rest.
_LOCKS_AT = 1 << 40


class Statistic(NamedTuple):
    """What is summed of one key."""

    key: Key
    #: Of the key's own statistics, and how many sums there are in all.
    shape: tuple[int, ...]
    dtype: str
    num_sums: int


class SharedStatistics:
    """What the ``VecNorm`` of several processes have seen, all together.

    Each of them is given the same one: ``VecNorm(in_keys, shared_td=shared)``, ``VecNormV2(in_keys,
    shared_data=shared)``; ``norm.share_memory()`` is short for it. It goes to workers with the functions that make
    their envs, and lasts as long as somebody has it. The process that made it must be there when others get it.

    Args:
        max_writers: how many processes may add to it at the same time.

    >>> from swath.envs import GymEnv, TransformedEnv, VecNorm
    >>> shared = SharedStatistics()
    >>> norms = [VecNorm(["observation"], shared_td=shared, decay=1.0) for _ in range(2)]
    >>> rollouts = [TransformedEnv(GymEnv("CartPole-v1"), norm).rollout(5) for norm in norms]
    >>> int(norms[0].state_dict()["observation_count"])
    12
    """

    def __init__(self, max_writers: int = 256) -> None:
        if max_writers < 1:
            raise ValueError(f"SharedStatistics: max_writers must be positive, got {max_writers}")
        platforms.require(
            "SharedStatistics",
            (platforms.SHARED_MEMORY, platforms.ORDERED_STORES),
            "give each worker statistics of its own (without share_memory)",
        )
        self._num_slots = max_writers + 1
        self._owner = os.getpid()
        self._token = os.urandom(_TOKEN_BYTES)
        self._descriptor = new_descriptor("swath-statistics")
        self._made_here = True
        os.posix_fallocate(self._descriptor, 0, _HEADER_BYTES)
        self._start()
        self._map_header(self._descriptor)
        self._header[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)

    def _start(self) -> None:
        #: Threads of this process share a slot.
        self._lock = threading.Lock()
        self._header: Any = None
        self._statistics: list[Statistic] = []
        self._settings: dict[str, Any] = {}
        self._sums: list[Sums] = []
        self._slot: int | None = None
        #: Open while a slot is taken: the system frees it with the process, however that ends.
        self._claim: int | None = None
        _alive.add(self)

    # -- on the way to other processes -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # By the number in the process that made it: that one has to keep it for those who are started later, anyway.
        place = {"_owner": self._owner, "_descriptor": self._descriptor, "_token": self._token}
        return {**place, "_num_slots": self._num_slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __copy__(self) -> SharedStatistics:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStatistics:
        return self

    def _open(self) -> int:
        """A descriptor of this memory that is nobody else's."""
        descriptor = None
        try:
            descriptor = os.open(f"/proc/{self._owner}/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(descriptor, _TOKEN_BYTES, 0) != self._token:  # another process, or another file by now
                raise FileNotFoundError("there is something else by now")
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise EnvError(
                f"statistics that process {self._owner} shares cannot be reached from process {os.getpid()} ({error}): "
                "it has let go of them, or is on another machine. Keep the VecNorm there as long as workers are "
                "started; over machines, send its state_dict()"
            ) from error
        return descriptor

    def _map_header(self, descriptor: int) -> None:
        self._header = map_descriptor(descriptor, _HEADER_BYTES).numpy()
        self._words: Any = memoryview(self._header[:_TEXT_AT]).cast("q")  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Nobody else changes what there is, whichever process; who is killed in here lets go of it."""
        descriptor = self._open()
        try:
            _lock(descriptor, 0, waits=True)
            yield descriptor
        finally:
            os.close(descriptor)

    # -- what there is ---------------------------------------------------------------------------------------------

    def attach(self, statistics: Sequence[Statistic], **settings: Any) -> None:
        """Have room for these; where others were before, they must have had the same in mind."""
        if not self.is_laid_out:
            with self._locked() as descriptor:
                if not self.is_laid_out:
                    self._lay_out(descriptor, {"statistics": list(statistics), **settings})
        self._load_layout()
        wanted = json.loads(json.dumps({"statistics": list(statistics), **settings}))
        found = json.loads(self._text())
        for name in wanted:
            if wanted[name] != found.get(name):
                raise ValueError(
                    f"these statistics are shared with others of another kind: {name} is {found.get(name)} there and "
                    f"{wanted[name]} here; give those that differ a SharedStatistics of their own"
                )

    @property
    def is_laid_out(self) -> bool:
        """Whether it is known what is summed."""
        if self._header is None:
            descriptor = self._open()
            try:
                self._map_header(descriptor)
            finally:
                os.close(descriptor)
        return self._words[_TEXT_LENGTH] > 0

    @property
    def statistics(self) -> list[Statistic]:
        """What is summed; nothing before the first env was made."""
        if not self._statistics and self.is_laid_out:
            self._load_layout()
        return self._statistics

    @property
    def sums(self) -> list[Sums]:
        """Of each of the ``statistics``."""
        return self._sums if self.statistics else []

    def _text(self) -> bytes:
        return bytes(self._header[_TEXT_AT : _TEXT_AT + self._words[_TEXT_LENGTH]])

    def _lay_out(self, descriptor: int, described: dict[str, Any]) -> None:
        text = json.dumps(described).encode()
        if len(text) > _HEADER_BYTES - _TEXT_AT:
            raise ValueError("SharedStatistics: too many keys; use several transforms, each with its own")
        *_, num_bytes = self._places(described["statistics"])
        os.ftruncate(descriptor, num_bytes)
        self._reserve(descriptor, described["statistics"], _LOADED)
        self._header[_TEXT_AT : _TEXT_AT + len(text)] = np.frombuffer(text, np.uint8)
        self._words[_NUM_USED] = _LOADED + 1
        self._words[_TEXT_LENGTH] = len(text)  # last: from here on it is there

    def _places(self, statistics: Sequence[Statistic]) -> list[int]:
        """Where the memory of each begins, and where all of it ends."""
        places = [_HEADER_BYTES]
        for statistic in statistics:
            places.append(places[-1] + self._num_slots * (8 + _slot_bytes(statistic)))
        return places

    def _reserve(self, descriptor: int, statistics: Sequence[Statistic], slot: int) -> None:
        """Pages for a slot: where there are none, this fails, instead of a SIGBUS later."""
        for statistic, place in zip(statistics, self._places(statistics), strict=False):
            os.posix_fallocate(descriptor, place, self._num_slots * 8)
            size = _slot_bytes(statistic)
            os.posix_fallocate(descriptor, place + self._num_slots * 8 + slot * size, size)

    def _load_layout(self) -> None:
        if self._statistics:
            return
        described = json.loads(self._text())
        statistics = [Statistic(tuple(k), tuple(s), d, n) for k, s, d, n in described["statistics"]]
        *places, num_bytes = self._places(statistics)
        descriptor = self._open()
        try:
            memory = map_descriptor(descriptor, num_bytes).numpy()
        finally:
            os.close(descriptor)
        for statistic, place in zip(statistics, places, strict=True):
            records_at = place + self._num_slots * 8
            counts = memory[place:records_at].view(np.int64)
            size = _slot_bytes(statistic)
            records = memory[records_at : records_at + self._num_slots * size].view(np.float64)
            records = records.reshape(self._num_slots * _COPIES, -1)
            self._sums.append(Sums(self, counts, records, statistic.num_sums))
        self._statistics = statistics

    # -- for sums --------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> threading.Lock:
        """Of this process's threads."""
        return self._lock

    def num_used(self) -> int:
        return self._words[_NUM_USED]

    def own_slot(self) -> int:
        """The slot of this process; from its first addition on."""
        if self._slot is None:
            with self._locked() as descriptor:
                self._take_slot(descriptor)
        return self._slot  # type: ignore[return-value]

    def _take_slot(self, descriptor: int) -> None:
        claim = self._open()
        for slot in range(_LOADED + 1, self._num_slots):
            if _lock(claim, slot, waits=False):
                self._reserve(descriptor, self.statistics, slot)
                self._words[_NUM_USED] = max(self._words[_NUM_USED], slot + 1)
                self._claim, self._slot = claim, slot
                return
        os.close(claim)
        raise EnvError(
            f"{self._num_slots - 1} processes add to these statistics already; make them with "
            f"SharedStatistics(max_writers={2 * (self._num_slots - 1)})"
        )

    def load(self, values: Sequence[tuple[int, np.ndarray]]) -> None:
        """Forget what there is, for all processes, and go on from this: additions and sums of each statistic."""
        with self._lock, self._locked():  # in the order in which a slot is taken
            for sums, (added, sums_loaded) in zip(self.sums, values, strict=True):
                sums.load(added, sums_loaded)

    def forget_slot(self) -> None:
        """In a process that was forked: the slot is its parent's."""
        self._lock = threading.Lock()
        self._slot = None
        self._let_go_of_claim()

    def _let_go_of_claim(self) -> None:
        claim, self._claim = self.__dict__.get("_claim"), None
        if claim is not None:
            os.close(claim)

    def __del__(self) -> None:
        self._let_go_of_claim()
        if self.__dict__.get("_owner") == os.getpid() and self.__dict__.get("_made_here"):
            os.close(self._descriptor)


class Sums:
    """Those of one key: of all processes, and how to add to one's own."""

    def __init__(self, shared: SharedStatistics, counts: np.ndarray, records: np.ndarray, num_sums: int) -> None:
        self._shared = weakref.proxy(shared)  # which has this one
        self._end = _HEAD + num_sums
        #: Of each slot, how often it was written: which of its copies is the newest.
        self._counts = counts
        self._records = records
        self._used = 0
        self._grow(1)

    def _grow(self, used: int) -> None:
        self._used = used
        self._newest = self._counts[:used]
        self._seen = np.zeros(used, np.int64)
        self._first_copies = np.arange(used) * _COPIES
        self._chosen = np.zeros(used, np.int64)
        self._copied = np.zeros((used, self._records.shape[1]))
        self._worth = np.zeros(used)
        self._times, self._added = self._copied[:, _TIME], self._copied[:, _ADDED]
        self._sums = self._copied[:, _HEAD : self._end]
        self._total = np.zeros(self._end - _HEAD)
        #: When all slots were of the same load, as the first slot's count.
        self._settled_at = -1

    def _look(self) -> None:
        """Copy the newest of each slot."""
        used = self._shared.num_used()
        if used != self._used:
            self._grow(used)
        newest, seen, chosen = self._newest, self._seen, self._chosen
        while True:
            seen[:] = newest
            np.bitwise_and(seen, _COPIES - 1, out=chosen)
            np.add(chosen, self._first_copies, out=chosen)
            np.take(self._records, chosen, axis=0, out=self._copied, mode="clip")
            if newest.tobytes() == seen.tobytes() or int((newest - seen).max()) <= _COPIES - 2:
                break
        if self._settled_at != seen[_LOADED]:
            self._leave_out_replaced()

    def _leave_out_replaced(self) -> None:
        """What was there before something else was loaded does not count."""
        copied = self._copied
        is_old = copied[:, _EPOCH] != copied[_LOADED, _EPOCH]
        copied[is_old] = 0
        copied[is_old, _EPOCH] = copied[_LOADED, _EPOCH]
        self._settled_at = -1 if is_old.any() else int(self._seen[_LOADED])

    def _put_together(self, time: float, decay: float) -> None:
        """Bring all to what they are worth at ``time``."""
        if decay != 1:
            worth = np.subtract(time, self._times, out=self._worth)
            np.power(decay, worth, out=worth)
            np.multiply(self._sums, worth[:, None], out=self._sums)

    def read(self, decay: float) -> tuple[np.ndarray, float]:
        """The sums of all processes, and how much was added; both are written again by the next call."""
        with self._shared.lock:
            self._look()
            time = float(self._added.sum())
            self._put_together(time, decay)
            return self._sums.sum(0, out=self._total), time

    def add(self, values: np.ndarray, amount: int, decay: float) -> tuple[np.ndarray, float]:
        """Add to one's own; as ``read``, with these among them. ``amount``: by how much the time goes on."""
        shared = self._shared
        with shared.lock:
            slot = shared.own_slot()
            self._look()
            time = float(self._added.sum()) + amount
            self._put_together(time, decay)
            own = self._copied[slot]
            own[_ADDED] += amount
            own[_TIME] = time
            own[_HEAD : self._end] += values
            count = int(self._seen[slot]) + 1
            self._records[slot * _COPIES + (count & (_COPIES - 1))] = own
            self._counts[slot] = count  # after the record: from here on it is the newest
            return self._sums.sum(0, out=self._total), time

    def load(self, added: int, values: np.ndarray) -> None:
        count = int(self._counts[_LOADED])
        before = self._records[_LOADED * _COPIES + (count & (_COPIES - 1))]
        record = self._records[_LOADED * _COPIES + ((count + 1) & (_COPIES - 1))]
        record[_EPOCH], record[_ADDED], record[_TIME] = before[_EPOCH] + 1, added, added
        record[_HEAD : self._end] = values
        self._counts[_LOADED] = count + 1


def _slot_bytes(statistic: Statistic) -> int:
    """Of the copies of one slot; whole cache lines, since the next slot is another process's."""
    return _COPIES * -(-8 * (_HEAD + statistic.num_sums) // 64) * 64


def _lock(descriptor: int, number: int, *, waits: bool) -> bool:
    """Lock a byte until the descriptor is closed, by whoever; False if somebody else has it."""
    import fcntl  # not on Windows, where this module is imported, too

    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCKS_AT + number, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


#: Those of this process.
_alive: weakref.WeakSet[SharedStatistics] = weakref.WeakSet()


def _forget_slots() -> None:
    for shared in list(_alive):
        shared.forget_slot()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_slots)


__all__ = ["SharedStatistics", "Statistic", "Sums"]
