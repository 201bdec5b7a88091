"""What a user is told when something goes wrong: one or two lines, and what to do next."""

from __future__ import annotations

import re

from swath.errors import UnsupportedPlatform, message_of, notes_of

#: Exit codes: of a collection that failed, and of a command that cannot be run as it was given.
FAILED = 1
USAGE = 2

#: Arguments that messages name, and the options that set them.
_OPTIONS = {
    "categorical_action_encoding": "--categorical",
    "num_workers": "--workers",
    "use a Collector with a SerialEnv": "leaving --workers out",
}


#: Packages, and the extras of swath that install them.
EXTRAS = {
    **{name: name for name in ("envpool", "mujoco", "pettingzoo", "ray", "submitit", "torchrl")},
    "ale_py": "atari",
    "dm_control": "dm-control",
    "shimmy": "dm-control",
    "mpe2": "pettingzoo",
    "pygame": "classic-control",
}


class UsageError(Exception):
    """The command cannot be run as it was given."""


def describe(error: BaseException) -> list[str]:
    """An error's type and message, then its notes; without those that are for Python callers only."""
    message = message_of(error).strip()
    lines = [f"{type(error).__name__}: {message}" if message else type(error).__name__]
    notes = [note for note in notes_of(error) if "collector.partial_batch" not in note]
    lines += [note.removeprefix("swath: ") for note in notes]
    return lines + on_the_command_line("\n".join(lines))


def on_the_command_line(message: str) -> list[str]:
    """What an argument that a message names is called here."""
    return [f"on the command line, that is {option}" for name, option in _OPTIONS.items() if name in message]


def without_paths(text: str) -> str:
    """``text`` with absolute paths cut to their last part: what is stored must not tell about this machine.

    >>> without_paths("cannot read '/home/me/weights.pt'")
    "cannot read 'weights.pt'"
    """
    return re.sub(r"(?<![\w.:/])(?:[A-Za-z]:)?[\\/](?:[^\s'\"\\/:]+[\\/])+", "", text)


def missing_module(error: ImportError) -> str | None:
    """The top-level module that an import did not find."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name.partition(".")[0]
        cause = cause.__cause__ or cause.__context__
    return None


def explain_setup(error: Exception, env_id: str) -> tuple[list[str], int]:
    """What to tell about an error before the first frame, and the exit code."""
    if isinstance(error, UsageError):
        return [str(error)], USAGE
    if isinstance(error, UnsupportedPlatform):
        return describe(error), USAGE
    if isinstance(error, ImportError) and (module := missing_module(error)):
        if module == env_id.partition(":")[0]:
            return [f"{env_id}: there is no module {module!r}, neither here nor installed"], USAGE
        extra = EXTRAS.get(module)
        what = module if extra is None else f'"swath[{extra}]"'
        return [f"{env_id} needs {module!r}, which is not installed: pip install {what}"], USAGE
    try:
        from gymnasium.error import DependencyNotInstalled, UnregisteredEnv
        from gymnasium.error import Error as GymError
    except ImportError:
        return describe(error), FAILED
    if isinstance(error, DependencyNotInstalled):
        return [str(error) if env_id in str(error) else f"{env_id}: {error}"], USAGE
    if isinstance(error, UnregisteredEnv):
        return _unknown_env(error, env_id), USAGE
    if isinstance(error, GymError):
        return [str(error)], USAGE
    return describe(error), FAILED


def _unknown_env(error: Exception, env_id: str) -> list[str]:
    lines = [str(error)]
    if "did you mean" not in lines[0]:
        lines.append(
            "an env of your own or of another package is named with the module that registers it: module:Env-v0, where "
            'the module says gymnasium.register("Env-v0", entry_point=make_env)'
        )
    return lines
