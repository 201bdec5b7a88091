"""What any worker process is made from, and what differs when it is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from swath.errors import add_note

if TYPE_CHECKING:
    from swath.envs.base import EnvBase


class Incarnation(NamedTuple):
    """What differs when a worker is started again."""

    number: int = 0
    #: No trajectory id below this is used.
    first_traj_id: int = 0


@dataclass(frozen=True)
class EnvsOfWorker:
    """Which envs a worker has, and how they are made."""

    worker: int
    members: range
    factories: Sequence[Any]
    env_kwargs: Sequence[Mapping[str, Any]]
    #: Makes an env of a factory and its keywords, beside those that are there: what an env is, is nothing to a process.
    make_env: Callable[[Any, Mapping[str, Any], Sequence[EnvBase]], EnvBase]
    #: Of all workers; each has a random stream of its own.
    base_seed: int
    #: For torch.
    num_threads: int

    #: Whether its users can have it started again when it is gone.
    can_be_restarted: ClassVar[bool] = False

    @property
    def shown(self) -> str:
        """Which envs, in messages."""
        envs = self.members
        return f"env {envs.start}" if len(envs) == 1 else f"envs {envs.start} to {envs.stop - 1}"

    def make_worker(self, channel: Any, page: Any, incarnation: Incarnation) -> Any:
        """What runs in the process."""
        raise NotImplementedError

    def result(self, *parts: Any) -> Any:
        """What a worker says when it has done what it was asked for."""
        return parts

    def make_envs(self, made: list[EnvBase]) -> None:
        """Make them, one after the other, into a list: whoever called closes them, also if one cannot be made."""
        for member, factory, kwargs in zip(self.members, self.factories, self.env_kwargs, strict=True):
            try:
                made.append(self.make_env(factory, kwargs, made))
            except Exception as error:
                add_note(error, f"swath: raised while env {member} was made")
                raise

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """What it is made of, by what its users call it."""
        for member, factory in zip(self.members, self.factories, strict=True):
            yield f"create_env_fn of env {member}", factory
        yield "create_env_kwargs", self.env_kwargs
