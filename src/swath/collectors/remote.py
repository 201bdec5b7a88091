"""RemoteCollector: what collectors share whose rollouts run elsewhere, in worker processes or on nodes."""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase

from swath.collectors.arguments import alike_or_each
from swath.collectors.asking import arguments_of_calls
from swath.collectors.base import BaseCollector
from swath.collectors.budget import Budget
from swath.collectors.forgotten_weights import ForgottenWeights
from swath.collectors.scheduler import Scheduler
from swath.errors import CollectorClosed, EnvError, message_of
from swath.keys import Key, nested
from swath.paths import parts_of_path
from swath.process.fair_lock import FairLock
from swath.rollout.layout import Field
from swath.warn import warn_user
from swath.weakly import weakly
from swath.weight_update.hidden import HiddenWeights
from swath.weight_update.processes import NoWeightSyncScheme
from swath.weight_update.weights import (
    choose_sources,
    has_weights,
    require_findable,
    require_no_weights,
    save_own_policy,
    weights_for_copies,
    weights_for_part,
)

WORKER: Key = ("collector", "worker")
ENV: Key = ("collector", "env")


class RemoteCollector(BaseCollector):
    """Base of the collectors whose rollouts run elsewhere; a place is a worker or a node.

    A subclass says how places are asked (``_ask_each``) and how weights reach them (``_send``).
    """

    _inner = ("check_state", "lock", "next_traj_id", "random_frames_due", "sends_weights", "set_weights")

    #: What a place is called, and how one says that something is there.
    _place: ClassVar[str]
    _where: ClassVar[str]

    policy: Any
    #: How weights travel, by model id.
    _schemes: Mapping[str, Any]
    #: Where batches are delivered.
    _storing: torch.device | None
    _scheduler: Scheduler[Any]
    _policy_version = 0

    def _begin(self) -> None:
        """First of all in a constructor."""
        self._lock = FairLock()
        self._owner_pid = os.getpid()

    def _schedule(self, budget: Budget, num_places: int, random_frames: int, requests_each: int = 2) -> None:
        """Once it is known what a batch is, and the base is made."""
        self._scheduler = Scheduler(budget.total_frames, random_frames, self._progress, num_places, requests_each)
        scheme = self._schemes.get("policy")
        keeps_its_weights = scheme is None or isinstance(scheme, NoWeightSyncScheme)  # as was asked for
        # (Weakly: a collector that nobody has any more ends then.)
        self._forgotten_weights = ForgottenWeights(
            None if keeps_its_weights else self.policy, weakly(self._has_sent_weights)
        )

    def _has_sent_weights(self) -> bool:
        return any(place.policy_version for place in self._places(time.monotonic())) or self._policy_version > 0

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many places there are; weights are addressed by their numbers."""

    @abstractmethod
    def _ask_each(self, name: str, *args: Any, **kwargs: Any) -> list[tuple[int, Any]]:
        """Call a method of what runs in each place, which goes on afterwards; numbers and answers."""

    @abstractmethod
    def _ask_place(self, place: int, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Of one place, in a list; an empty one if it is gone, and collection goes on."""

    @abstractmethod
    def _send(self, sources: Mapping[str, Any], places: int | Sequence[int] | None) -> None:
        """Send weights that were checked; counts the policy's version up."""

    def _know_fragments(self, fragments: Iterable[int]) -> None:
        """Ids of trajectories that are no whole episodes."""
        self._tally.fragments.update(fragments)
        if self._assembler is not None:
            self._assembler.fragments.update(fragments)

    def _batch_is_made(self) -> None:
        super()._batch_is_made()
        self._forgotten_weights.look()

    def iterator(self) -> Iterator[Any]:
        yield from super().iterator()
        self._forgotten_weights.look_back()

    # -- who may do what -------------------------------------------------------------------------------------------

    @property
    def lock(self) -> FairLock:
        """Of weight schemes. Whoever holds it, no other thread sends weights, makes requests or starts places again."""
        return self._lock

    def _require_open(self) -> None:
        if self._owner_pid != os.getpid():
            raise RuntimeError(
                f"this collector's {self._place}s belong to process {self._owner_pid}, and this is {os.getpid()}; make "
                "the collector in the process that iterates over it (a DataLoader: num_workers=0)"
            )
        self._require_open_unless(False)

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """For what several threads may do: one at a time, so that versions arrive as they were counted."""
        self._require_open()
        with self._lock:
            self._require_open()
            try:
                yield
            except Exception as error:
                if self._closed and not isinstance(error, CollectorClosed):  # by another thread, in the middle of it
                    self._require_open()
                raise

    # -- weights ---------------------------------------------------------------------------------------------------

    def _make_schemes(self, given: Any, policy: Any, default: type | None) -> dict[str, Any]:
        """By model id; ``default`` for the policy, where none were given and it may have weights."""
        schemes: dict[str, Any] = dict(given or {})
        if given is None and default is not None:
            schemes["policy"] = default()
        for model_id, scheme in schemes.items():
            self._check_scheme(scheme)
            if model_id == "policy" and policy is not None and not has_weights(policy):
                raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to send")
            scheme.init_on_sender(model_id=model_id, context=self)
        return schemes

    def _check_scheme(self, scheme: Any) -> None:
        """Raise if it is none of this collector's kind."""

    def _must_send_first(self, policy_factory: Any) -> bool:
        """Whether places may have begun with other weights than the policy here: one that a function finds by its name
        may be another one where the function is imported."""
        if self.policy is None or "policy" not in self._schemes:
            return False
        return bool(policy_factory or HiddenWeights(self.policy).tensors)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Send weights where the policy runs: a module's, a TensorDict's, a state dict's; ``{worker: weights}``.

        Without arguments, those of the policy that the collector was made with. Returns when all (or those of
        ``worker_ids``) have applied them, each between two steps.
        """
        sources = choose_sources(policy_or_weights, weights, policy, weights_dict, model_id, policy_weights)
        with self._while_open(), self._recorded_update():
            self._update(sources, worker_ids, is_named=model_id is not None or weights_dict is not None)

    def _update(self, sources: Mapping[str, Any], places: int | Sequence[int] | None, *, is_named: bool) -> None:
        # All that can be wrong is found out before anything is sent, or counted.
        checked = {name: self._checked_source(name, source) for name, source in sources.items()}
        self._send({name: source for name, source in checked.items() if name in self._schemes}, places)

    def _checked_source(self, name: str, source: Any) -> Any:
        """What is sent for a source: before any place gets some of it, that it fits."""
        if name not in self._schemes:
            self._refuse_model(name, source)
            return None
        if name != "policy":
            return weights_for_part(source)
        if source is None and self.policy is None:
            raise RuntimeError(
                f"update_policy_weights_: the policy was made by policy_factory {self._where}, so there are no weights "
                "here to send; give them, or give policy= as well as policy_factory="
            )
        if source is None:
            require_findable(self.policy)
            return None
        if self.policy is None:
            return source
        if is_per_place(source):
            return {place: weights_for_copies(self.policy, each) for place, each in source.items()}
        return weights_for_copies(self.policy, source)

    def _refuse_model(self, name: str, source: Any) -> None:
        if name != "policy":
            known = ", ".join(map(repr, self._schemes)) or "none"
            raise KeyError(
                f"there is no model {name!r} whose weights can be sent; weight_sync_schemes has {known}: give a scheme "
                "for it there"
            )
        if source is not None:
            raise TypeError(
                f"the policy ({type(self.policy).__name__}) is no nn.Module, so it has no weights to update"
            )
        require_no_weights(self.policy)

    def send_weights(self, weights: Any, worker_ids: int | Sequence[int] | None = None) -> None:
        """Weights of the policy, for updaters."""
        if "policy" not in self._schemes:
            self._refuse_model("policy", weights)
        with self._while_open():
            self._send({"policy": self._checked_source("policy", weights)}, worker_ids)

    def receive_weights(self, policy_or_weights: Any = None) -> None:
        """As ``update_policy_weights_``; a collector in this process has no one to receive from."""
        self.update_policy_weights_(policy_or_weights)

    @property
    def policy_version(self) -> int:
        """How often weights were sent."""
        return self._policy_version

    def get_policy_version(self) -> int:
        return self._policy_version

    def increment_version(self) -> None:
        self._policy_version += 1

    # -- state -----------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, Any]:
        """What a state has beside what each place can save of itself."""
        return {
            **save_own_policy(self.policy),
            "frames": self._frames,
            "iter": self._iter,
            "policy_version": self._policy_version,
            "random_frames_left": self.random_frames_due,
        }

    def _load_counters(self, state_dict: Mapping[str, Any]) -> None:
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        self._policy_version = state_dict["policy_version"]
        self._forgotten_weights.begin()  # they have those of the state, too
        self._scheduler.random_frames_left = state_dict["random_frames_left"]
        self._drop_episodes()
        self._iterator = None

    @property
    def _random_frames_left(self) -> int:
        return self._scheduler.random_frames_left

    @property
    def random_frames_due(self) -> int:
        """As of what was delivered: those that are under way count, too."""
        return self._scheduler.random_frames_left + self._scheduler.random_under_way

    def _drop_episodes(self) -> None:
        """Those that are being put together do not go on."""
        if self._assembler is not None:
            self._assembler.drop_all()

    # -- looking there ---------------------------------------------------------------------------------------------

    def getattr_env(self, name: str) -> Any:
        """An attribute of the first place's env."""
        return self._ask_first("getattr_env", name)

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the first place's policy."""
        return self._ask_first("getattr_policy", name)

    def _ask_first(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._require_open()
        answer: list[Any] = []
        while not answer:  # one that is gone has another in its place
            answer = self._ask_place(self._first_place, name, *args, **kwargs)
        return answer[0]

    @property
    def _first_place(self) -> int:
        return 0

    def get_distant_attr(self, path: str) -> list[Any]:
        """What a path leads to in each place's collector: ``"worker_idx"``, ``"env.transform[0].loc"``.

        Of several envs in a place it is a list with what is in each.
        """
        self._require_open()
        parts_of_path(path)  # what is none is refused here
        return [answer for _, answer in self._ask_each("get_distant_attr", path)]

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``path`` (such as ``"env.set_level"``, or ``"env.transform[0].freeze"``) in every place."""
        self._require_open()
        parts_of_path(path)
        return [answer for _, answer in self._ask_each("cascade_execute", path, *args, **kwargs)]

    def map_fn(
        self, name: str, list_of_args: Sequence[Any] | None = None, list_of_kwargs: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call a method of each place's collector with its own arguments."""
        self._require_open()
        parts_of_path(name)
        calls = arguments_of_calls(list_of_args, list_of_kwargs, self.num_workers, self._place)
        answers = [
            self._ask_place(place, "cascade_execute", name, *args, **kwargs)
            for place, (args, kwargs) in enumerate(calls)
        ]
        return [answer[0] for answer in answers if answer]

    def policy_plan(self) -> str:
        """How the policy is called in each place, and why not faster; see ``Collector.policy_plan``."""
        return alike_or_each(self.cascade_execute("policy_plan"), self._place)

    def env_plan(self) -> str:
        """How each place's envs are stepped, and why not faster; see ``Collector.env_plan``."""
        return alike_or_each(self.cascade_execute("env_plan"), self._place)

    def get_model(self, model_id: str) -> Any:
        if model_id != "policy":
            raise KeyError(f"there is no model {model_id!r} in this process; {self._place}s have it")
        return self.policy

    # -- ending ----------------------------------------------------------------------------------------------------

    def __del__(self) -> None:
        self._say_that_it_is_gone()
        self.shutdown(raise_on_error=False)

    def _describe_places(self) -> str:
        return f"{self.num_workers} {self._place}s"

    def __repr__(self) -> str:
        if "_budget" not in self.__dict__:
            return f"{type(self).__name__}(not started)"
        policy = "policy_factory" if self.policy is None else type(self.policy).__name__
        return (
            f"{type(self).__name__}({self._describe_places()}, policy={policy}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.total_frames}, "
            f"frames so far={self._frames:,})"
        )


def as_batch(
    leaves: Mapping[Key, torch.Tensor], shape: Sequence[int], storing: torch.device | None, *, num_dims: int
) -> TensorDictBase:
    """Leaves whose first ``num_dims`` dimensions are frames, in the order of ``shape``, of which the last is time."""
    tree = nested({key: leaf.view(*shape, *leaf.shape[num_dims:]) for key, leaf in leaves.items()})
    names: Any = [None] * (len(shape) - 1) + ["time"]
    device = storing if storing is not None and storing.type == "cpu" else None
    batch = TensorDict(tree, batch_size=shape, names=names, device=device)
    return batch if device is not None or storing is None else batch.to(storing)


@dataclass(frozen=True)
class Delivers:
    """What a place delivers: fields, of envs in the order of ``lead``."""

    lead: tuple[int, ...]
    fields: tuple[Field, ...]

    def require_alike(self, first: Delivers, who: str, first_who: str) -> None:
        if self == first:
            return
        mine = {f.key: (tuple(f.shape), f.dtype) for f in first.fields}
        theirs = {f.key: (tuple(f.shape), f.dtype) for f in self.fields}
        differing = next((key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)), None)
        what = (
            f"batches of {first.lead} envs against {self.lead}"
            if differing is None
            else f"{differing}: {mine.get(differing)} against {theirs.get(differing)}"
        )
        raise EnvError(f"{who} delivers other data than {first_who}: {what}; all envs must be alike")


def warn_started_again(error: BaseException, who: str) -> None:
    """What was lost, and that it is there again."""
    warn_user(
        f"{message_of(error)} It was started again as {who}; the episodes that it was in have ended without a done "
        "flag where they were delivered already, and go on under new ids"
    )


def is_per_place(source: Any) -> bool:
    """Whether weights are given as ``{worker: weights}``."""
    return isinstance(source, dict) and bool(source) and all(isinstance(key, int) for key in source)
