"""What was recorded of a process, on its way to whoever draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swath.timeline.recorder import Record, record_of


@dataclass(frozen=True)
class Recording:
    """The records of one process.

    Args:
        name: what the process is to the user: "worker 3".
        records: in the order in which they ended.
        threads: names of the threads that wrote them; those that are not named here are called by number.
        restarts: how often the process had been started again.
    """

    name: str
    pid: int
    records: Sequence[Record]
    threads: dict[int, str] = field(default_factory=dict)
    restarts: int = 0

    def as_plain_data(self) -> dict[str, Any]:
        """For ways that take numbers, text and tensors only.

        >>> from swath.timeline.recorder import Kind
        >>> recording = Recording("worker 0", 12, [Record(Kind.CALL, 0.5, 1.5, 0.0, 0.0, 0.0, 7)], {7: "main"}, 1)
        >>> Recording.of_plain_data(recording.as_plain_data()) == recording
        True
        """
        rows = [[r.kind, r.start_s, r.end_s, r.count, r.x, r.y, r.thread] for r in self.records]
        return {
            "name": self.name,
            "pid": self.pid,
            "records": torch.tensor(rows, dtype=torch.float64).reshape(-1, 7),
            "threads": [[number, name] for number, name in self.threads.items()],
            "restarts": self.restarts,
        }

    @classmethod
    def of_plain_data(cls, data: Mapping[str, Any]) -> Recording:
        records = [record_of(row) for row in data["records"].tolist()]
        return cls(**{**data, "records": records, "threads": dict(data["threads"])})

    def moved(self, seconds: float) -> Recording:
        """As of another clock, which is so much ahead."""
        records = [
            replace(record, start_s=record.start_s + seconds, end_s=record.end_s + seconds) for record in self.records
        ]
        return replace(self, records=records)
