"""``metadata.json``: how a dataset came to be. Nothing in it tells about the machine's directories."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath import __version__
from swath.cli.options import CollectOptions
from swath.cli.outcome import Outcome
from swath.dataset_format import FORMAT, FORMAT_VERSION, METADATA
from swath.envs import EnvBase

_MOST_VALUES = 64


def write_metadata(
    folder: Path, options: CollectOptions, outcome: Outcome, frames_per_batch: int, specs: dict[str, Any]
) -> None:
    """Instead of what is there, in one piece: a program may be killed, or a disk full, at any time."""
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **options.identity(),
        "policy": options.policy or "random",
        "frames_per_batch": frames_per_batch,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **outcome.as_dict(),
        "versions": versions(),
        "specs": specs,
        "command": command(options),
        "arguments": arguments_without_paths(options),
    }
    text = json.dumps(metadata, indent=2, allow_nan=False)
    new = folder / f"{METADATA}.new"
    try:
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, folder / METADATA)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"swath": __version__, "python": platform.python_version()}
    for package in ("torch", "tensordict", "gymnasium", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def arguments_without_paths(options: CollectOptions) -> dict[str, Any]:
    trace = Path(options.trace).name if options.trace else options.trace
    return {**asdict(options), "out": Path(options.out).name, "trace": trace}


def command(options: CollectOptions) -> str:
    """The command that collects the same again, with the seed that was drawn."""
    words = ["swath", "collect", options.env_id, "--frames", str(options.frames), "--envs", str(options.envs)]
    words += ["--seed", str(options.seed)]
    for flag, value in (
        ("--workers", options.workers),
        ("--policy", options.policy),
        ("--max-frames-per-traj", options.max_frames_per_traj),
        ("--frames-per-batch", options.frames_per_batch),
    ):
        if value is not None:
            words += [flag, str(value)]
    for flag, is_given in (("--sync", options.sync), ("--categorical", options.categorical)):
        if is_given:
            words.append(flag)
    return shlex.join([*words, "--out", Path(options.out).name])


def describe_env(env: EnvBase) -> dict[str, Any]:
    """What a single env's entries look like, by its specs."""
    kinds = {
        "observation": env.observation_spec,
        "action": env.full_action_spec,
        "reward": env.full_reward_spec,
    }
    lead = len(env.batch_size)
    return {
        kind: {_name(key): _describe(spec, lead) for key, spec in composite.items(True, True)}
        for kind, composite in kinds.items()
    }


def describe_stored(frame: TensorDictBase) -> dict[str, Any]:
    """What every key that was stored looks like, by its tensor."""
    return {
        _name(key): {"shape": list(leaf.shape[frame.ndim :]), "dtype": str(leaf.dtype).removeprefix("torch.")}
        for key, leaf in sorted(frame.items(True, True), key=lambda item: _name(item[0]))
    }


def _name(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _describe(spec: Any, lead: int) -> dict[str, Any]:
    described = {
        "type": type(spec).__name__,
        "shape": list(spec.shape[lead:]),
        "dtype": str(spec.dtype).removeprefix("torch."),
    }
    for name in ("n", "nvec", "low", "high"):
        if hasattr(spec, name):
            described[name] = _values(np.asarray(getattr(spec, name)))
    return described


def _values(values: np.ndarray) -> Any:
    """Numbers for JSON: one where all are the same, text where they are infinite, none where they are too many."""
    if values.size and (values == values.flat[0]).all():
        return _number(values.flat[0].item())
    if values.size > _MOST_VALUES:
        return None
    return [_number(value) for value in values.reshape(-1).tolist()]


def _number(value: Any) -> Any:
    return value if np.isfinite(value) else str(value)
