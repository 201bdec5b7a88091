"""Editing: frames that are in a buffer, changed in place by whoever has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.drawing import Drawing
from swath.data.intake import Intake
from swath.data.parts import BufferParts
from swath.data.sources import Sources
from swath.data.storage_base import Tell
from swath.keys import Key, as_key

#: What samples have besides what is stored.
_OF_SAMPLES = ("index", "priority_weight")


class Editing:
    """Changes frames: as one turn among those that write, and with the sampler and the writer knowing."""

    def __init__(self, parts: BufferParts, sources: Sources, intake: Intake, drawing: Drawing) -> None:
        self._parts = parts
        self._sources = sources
        self._intake = intake
        self._drawing = drawing
        intake.were_replaced = self._were_replaced
        self.begin()

    def begin(self) -> None:
        """Be asked by the storage that the buffer has now."""
        self._parts.storage.take_turns(self._turn)

    @contextmanager
    def _turn(self) -> Iterator[Tell]:
        if self._sources.writes_elsewhere:
            raise RuntimeError(
                "workers are writing to this buffer; change frames before start(), or within collector.pause()"
            )
        self._parts.writer.require_changes()
        with self._intake.lock:
            try:
                yield self._were_replaced
            finally:
                self._parts.writer.mark_update()

    def _were_replaced(self, slots: np.ndarray) -> None:
        with self._drawing.lock:
            self._parts.sampler.mark_update(self._parts.storage.tracks.window(), slots)

    def replace(self, index: Any, data: Any, is_sample: bool) -> None:
        """Other frames instead of these; ``is_sample``: they may be a sample, with what was added to it."""
        if is_sample and isinstance(data, TensorDictBase):
            data = data.exclude(*(key for key in _OF_SAMPLES if not self._has_key((key,))))
        self._parts.storage.replace(index, self._parts.transforms.inverted_in_place(data))

    def _has_key(self, key: Key) -> bool:
        return key in getattr(self._parts.storage, "leaves", ())

    def set_key(self, key: Any, value: Any, index: Any = slice(None)) -> None:
        self._parts.storage.set_keys(index, {as_key(key): value})

    def update(self, data: Any, keys: Sequence[Any] | None) -> None:
        """What is given of all frames."""
        if not isinstance(data, Mapping) and not is_tensor_collection(data):
            raise TypeError(f"update_ takes a TensorDict or a dict, got {type(data).__name__}")
        given = _leaves(data)
        if keys is not None:
            wanted = [as_key(key) for key in keys]
            given = {key: leaf for key, leaf in given.items() if any(key[: len(each)] == each for each in wanted)}
        self._parts.storage.set_keys(slice(None), given)


def _leaves(data: Any, above: Key = ()) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for name, entry in data.items():
        key = (*above, *as_key(name))
        if isinstance(entry, Mapping) or is_tensor_collection(entry):
            found.update(_leaves(entry, key))
        else:
            found[key] = entry
    return found
