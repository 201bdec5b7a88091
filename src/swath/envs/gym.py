"""Gymnasium envs: from an id, or one that the user made."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import torch
from gymnasium import spaces

from swath.envs.gym_infos import describe
from swath.envs.gym_rows import GymRowEnv
from swath.envs.known import import_extra, wrapper_of
from swath.errors import EnvError, did_you_mean
from swath.hints import argument_hint, no_attribute, wrapped


class _FrameSkip(gymnasium.Wrapper):
    """Repeats each action; rewards add up, and an episode's end ends the repetition."""

    def __init__(self, env: gymnasium.Env, frame_skip: int) -> None:
        super().__init__(env)
        self._frame_skip = frame_skip

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._frame_skip - 1):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                return observation, total, terminated, truncated, info
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, total + float(reward), terminated, truncated, info


class GymWrapper(GymRowEnv):
    """A ``gymnasium.Env`` that you made.

    Args:
        env: the env. A ``gymnasium.vector.VectorEnv`` gives a batched env.
        categorical_action_encoding: discrete actions (and observations) as integers instead of one-hot vectors.
        from_pixels: add ``pixels``, what ``env.render()`` shows; needs ``render_mode="rgb_array"``.
        pixels_only: with ``from_pixels``, drop the other observations.
        frame_skip: repeat each action this many times.
        info_keys: entries of ``info`` to keep as keys: names, of which a dictionary becomes nested keys; or a mapping
            to specs (a ``Composite`` for a dictionary), for those that the first step does not show. They are zero
            where the info has none; of a name that the first step showed, only after a reset. ``"episode"`` of
            Gymnasium's ``RecordEpisodeStatistics`` is known: ``("next", "episode", "r")`` where ``("next", "done")``.

    >>> env = GymWrapper(gymnasium.make("CartPole-v1"))
    >>> env.rollout(3)["observation"].shape
    torch.Size([3, 4])
    """

    def __new__(cls, env: Any = None, *args: Any, **kwargs: Any) -> Any:
        if wrapper := wrapper_of(env):  # EnvPool's are Gymnasium envs, too, but take more than that
            return wrapper(env, *args, **kwargs)
        if isinstance(env, gymnasium.vector.VectorEnv):
            from swath.envs.vector import VectorEnv

            return VectorEnv(env, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        env: gymnasium.Env,
        categorical_action_encoding: bool = False,
        *,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        device: torch.device | str | None = None,
        info_keys: Sequence[str] | Mapping[str, Any] = (),
    ) -> None:
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                f"GymWrapper takes a gymnasium.Env, got {type(env).__name__}"
                + ("; to make one from its id, use GymEnv" if isinstance(env, str) else "")
            )
        if frame_skip is not None and frame_skip > 1:
            env = _FrameSkip(env, frame_skip)
        if from_pixels:
            if env.render_mode != "rgb_array":
                raise EnvError(
                    f"{describe(env)}: from_pixels needs render_mode='rgb_array', it is {env.render_mode!r}; make the "
                    "env with gymnasium.make(..., render_mode='rgb_array')"
                )
            env = gymnasium.wrappers.AddRenderObservation(
                env, render_only=pixels_only, render_key="pixels", obs_key="observation"
            )
            if pixels_only:
                env = PixelsUnderTheirName(env)
        super().__init__(
            [env],
            batch_size=(),
            device=device,
            categorical_action_encoding=categorical_action_encoding,
            info_keys=info_keys,
        )

    @property
    def env(self) -> gymnasium.Env:
        """The wrapped env."""
        return self.gym_envs[0]

    def __getattr__(self, name: str) -> Any:
        env = wrapped(self, "gym_envs", name)[0]
        try:
            return env.get_wrapper_attr(name)
        except AttributeError:
            raise no_attribute(self, name, describe(env)) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.env)}, batch_size={tuple(self.batch_size)})"


class PixelsUnderTheirName(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(pixels=env.observation_space)

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"pixels": observation}


_DRAWN = ("human", "rgb_array", "rgb_array_list")
_DRAWN_BY_PYGAME = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
#: Ids of other packages, those packages (the last one registers the ids), and the extra that installs them.
_REGISTERED_BY = (
    (re.compile(r"ALE/|.*NoFrameskip-v"), ("ale_py",), "atari"),
    (re.compile(r"dm_control/"), ("dm_control", "shimmy"), "dm-control"),
)


class GymEnv(GymWrapper):
    """A Gymnasium env from its id; other keywords go to ``gymnasium.make``.

    >>> env = GymEnv("CartPole-v1")
    >>> sorted(env.reset().keys())
    ['done', 'observation', 'terminated', 'truncated']
    """

    def __new__(cls, env_name: str = "", *args: Any, num_envs: int | None = None, **kwargs: Any) -> Any:
        if num_envs is None:
            return super().__new__(cls, None)
        from swath.envs.serial import SerialEnv

        return SerialEnv(num_envs, lambda: cls(env_name, *args, **kwargs))

    def __init__(
        self,
        env_name: str,
        categorical_action_encoding: bool = False,
        *,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        device: torch.device | str | None = None,
        info_keys: Sequence[str] | Mapping[str, Any] = (),
        num_envs: None = None,  # a number is for __new__, which then makes a SerialEnv
        **make_kwargs: Any,
    ) -> None:
        if from_pixels:
            make_kwargs.setdefault("render_mode", "rgb_array")
        super().__init__(
            make_gym_env(env_name, **make_kwargs),
            categorical_action_encoding,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            frame_skip=frame_skip,
            device=device,
            info_keys=info_keys,
        )
        self.env_name = env_name


def explained(error: gymnasium.error.DependencyNotInstalled, env_name: str) -> Exception:
    """What Gymnasium says is missing, with the extra of swath that installs it, if one does."""
    said = str(error).lower()
    for word, extra in (("mujoco", "mujoco"), ("classic", "classic-control"), ("atari", "atari"), ("ale_py", "atari")):
        if word in said:
            how = f'needs a package that is not installed: pip install "swath[{extra}]"'
            return gymnasium.error.DependencyNotInstalled(f"{env_name} {how}")
    return error


def make_gym_env(env_name: str, **kwargs: Any) -> gymnasium.Env:
    """``gymnasium.make`` that, for an unknown id, names the nearest known ones."""
    if not isinstance(env_name, str):
        raise TypeError(f"GymEnv takes an env id such as 'CartPole-v1', got {type(env_name).__name__}; see GymWrapper")
    _register(env_name)
    try:
        env = gymnasium.make(env_name, **kwargs)
        if kwargs.get("render_mode") in _DRAWN and type(env.unwrapped).__module__.startswith(_DRAWN_BY_PYGAME):
            import_extra("pygame", "classic-control", f"render_mode={kwargs['render_mode']!r} of {env_name}")
        return env
    except (
        gymnasium.error.NameNotFound,
        gymnasium.error.NamespaceNotFound,
        gymnasium.error.VersionNotFound,
    ) as error:
        hint = did_you_mean(env_name, gymnasium.registry)
        if not hint and ":" not in env_name:  # registered by the program, and not in the worker that makes it
            hint = f"; if a module of yours registers it: 'module:{env_name}' imports that wherever the env is made"
        raise type(error)(f"there is no env {env_name!r}{hint}") from None
    except TypeError as error:
        for name in kwargs:
            if (hint := argument_hint(GymEnv, name)) is not None and repr(name) in str(error):
                raise TypeError(f"GymEnv({env_name!r}) got an unknown argument: {name!r} ({hint})") from error
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        raise explained(error, env_name) from error


def _register(env_name: str) -> None:
    """Import the package that registers an id, in whichever process the env is made."""
    for ids, packages, extra in _REGISTERED_BY:
        if ids.match(env_name):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that there is no display, which only rendering needs
                    *_, registering = [import_extra(package, extra, env_name) for package in packages]
            except ModuleNotFoundError as error:
                raise gymnasium.error.DependencyNotInstalled(str(error)) from error
            gymnasium.register_envs(registering)
