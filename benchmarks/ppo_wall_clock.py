"""PPO on CartPole until it has learned: examples/ppo_cartpole.py against Stable-Baselines3's PPO, by the clock.

    .venv/bin/python ppo_wall_clock.py
    .venv/bin/python ppo_wall_clock.py --seeds 0 --frames 20000

Both have the same networks (orthogonal first weights), envs, batches, passes, learning rate, clipping, discount and
limit of gradients, all read from the example; one thread of torch. Both measure the same thing the same way: the mean
return of the last 100 training episodes, after every batch. Each run is a program of its own; its clock starts
when imports are over, so the start of workers is in it. Contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
TARGET, EPISODES = 475, 100
CONTENDERS = {
    "swath": "swath, `examples/ppo_cartpole.py` (MultiSyncCollector)",
    "sb3-dummy": "Stable-Baselines3, DummyVecEnv",
    "sb3-subproc": "Stable-Baselines3, SubprocVecEnv",
}


def swath_progress(seed: int, total_frames: int) -> Iterator[tuple[int, deque[float]]]:
    """Yields after each batch: frames, and the returns of the last episodes."""
    import ppo_cartpole
    from common import Returns

    returns = Returns(last=EPISODES)
    for frames, _, batch in ppo_cartpole.train(seed, total_frames):
        returns.add(batch)
        yield frames, returns.last


def sb3_progress(vec_env_name: str, seed: int, total_frames: int) -> Iterator[tuple[int, deque[float]]]:
    """The same, of ``PPO.learn``: its loop, with a look after each pass of it."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common import vec_env
    from stable_baselines3.common.monitor import Monitor
    from torch import nn

    import ppo_cartpole as example

    make_envs = [lambda: Monitor(gymnasium.make("CartPole-v1"))] * example.NUM_ENVS
    # Forked as the example's workers are; its default would import everything again in each.
    options = {"start_method": "fork"} if vec_env_name == "SubprocVecEnv" and sys.platform == "linux" else {}
    envs = getattr(vec_env, vec_env_name)(make_envs, **options)
    model: Any = PPO(
        "MlpPolicy",
        envs,
        n_steps=example.STEPS_PER_BATCH,
        batch_size=example.NUM_ENVS * example.STEPS_PER_BATCH,
        n_epochs=example.EPOCHS,
        gamma=example.GAMMA,
        gae_lambda=example.LAMBDA,
        learning_rate=lambda remaining: example.LEARNING_RATE * remaining,
        clip_range=lambda remaining: example.CLIP * remaining,
        ent_coef=0.0,
        vf_coef=example.VALUE_WEIGHT,
        max_grad_norm=example.MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.Tanh},
        seed=seed,
        device="cpu",
    )
    try:
        _, callback = model._setup_learn(total_frames)
        callback.on_training_start(locals(), globals())
        while model.num_timesteps < total_frames:
            model.collect_rollouts(envs, callback, model.rollout_buffer, n_rollout_steps=model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, total_frames)
            model.train()
            yield model.num_timesteps, deque(episode["r"] for episode in model.ep_info_buffer)
    finally:
        envs.close()


def run_once(contender: str, seed: int, total_frames: int) -> dict[str, Any]:
    """Train on all frames; note when the target was reached on the way."""
    import torch

    import swath.collectors  # noqa: F401  imports are not measured

    if contender.startswith("sb3"):
        import stable_baselines3  # noqa: F401
    sys.path.insert(0, str(EXAMPLES))
    import ppo_cartpole  # noqa: F401

    torch.set_num_threads(1)
    started = time.perf_counter()
    if contender == "swath":
        progress = swath_progress(seed, total_frames)
    else:
        progress = sb3_progress(
            {"sb3-dummy": "DummyVecEnv", "sb3-subproc": "SubprocVecEnv"}[contender], seed, total_frames
        )
    seconds_to_first_batch = reached = None
    frames = 0
    for frames, returns in progress:
        if seconds_to_first_batch is None:
            seconds_to_first_batch = time.perf_counter() - started
        if reached is None and len(returns) == EPISODES and sum(returns) / EPISODES >= TARGET:
            reached = {"frames": frames, "seconds": round(time.perf_counter() - started, 3)}
    return {
        "contender": contender,
        "seed": seed,
        "frames": frames,
        "seconds": round(time.perf_counter() - started, 3),
        "seconds_to_first_batch": round(seconds_to_first_batch or 0.0, 3),
        "reached": reached,
    }


def in_a_program_of_its_own(contender: str, seed: int, total_frames: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", contender, "--seeds", str(seed), "--frames", str(total_frames)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds; to the target only where every seed reached it."""
    lines = [
        f"| | mean seconds to {TARGET} | its seeds | mean frames to {TARGET} | mean seconds for all frames | "
        "of these, to the first batch | frames/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for contender, title in CONTENDERS.items():
        its = [r for r in runs if r["contender"] == contender]
        if not its:
            continue
        reached = [r["reached"] for r in its if r["reached"]]
        everywhere = len(reached) == len(its)
        seconds = statistics.mean(r["seconds"] for r in its)
        to_target = f"{statistics.mean(r['seconds'] for r in reached):.1f}" if everywhere else "not all seeds"
        frames = f"{statistics.mean(r['frames'] for r in reached):,.0f}" if everywhere else "not all seeds"
        each = ", ".join(f"{r['reached']['seconds']:.1f}" if r["reached"] else "never" for r in its)
        first = statistics.mean(r["seconds_to_first_batch"] for r in its)
        speed = statistics.mean(r["frames"] / r["seconds"] for r in its)
        lines.append(f"| {title} | {to_target} | {each} | {frames} | {seconds:.1f} | {first:.1f} | {speed:,.0f} |")
    return "\n".join([*lines, "", *conclusions(runs)])


def conclusions(runs: list[dict[str, Any]]) -> list[str]:
    def mean(contender: str, of_target: bool) -> float | None:
        its = [r for r in runs if r["contender"] == contender]
        if not its or (of_target and not all(r["reached"] for r in its)):
            return None
        return statistics.mean(r["reached"]["seconds"] if of_target else r["seconds"] for r in its)

    lines = []
    for contender in ("sb3-dummy", "sb3-subproc"):
        for of_target, what in ((True, f"to {TARGET}"), (False, "for the same number of frames")):
            ours, theirs = mean("swath", of_target), mean(contender, of_target)
            if ours is None or theirs is None:
                lines.append(f"- {what}: no comparison with {CONTENDERS[contender]}, not every seed reached it")
            else:
                lines.append(f"- {what}: swath needs {ours / theirs:.2f} of the time of {CONTENDERS[contender]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--frames", type=int, default=122_880, help="of every run; schedules are spread over them")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, default=HERE / "results" / "ppo-wall-clock.json")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_once(options.child, options.seeds[0], options.frames)))
        return
    from machine import machine_facts, warn_if_busy

    warn_if_busy()
    runs = []
    for number, seed in enumerate(options.seeds):
        turn = number % len(options.only)
        for contender in [*options.only[turn:], *options.only[:turn]]:  # another one is first with every seed
            runs.append(in_a_program_of_its_own(contender, seed, options.frames))
            print(json.dumps(runs[-1]), file=sys.stderr)
    parameters = {"seeds": options.seeds, "frames": options.frames, "target": TARGET, "episodes": EPISODES}
    options.json.write_text(
        json.dumps({"machine": machine_facts(), "parameters": parameters, "results": runs}, indent=1) + "\n"
    )
    print(table(runs))


if __name__ == "__main__":
    main()
