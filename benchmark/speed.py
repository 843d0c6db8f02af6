"""How fast the scripts are, beside Stable-Baselines3 and SBX on the same machine, and where the time goes.

    python -m venv peers && peers/bin/pip install -r benchmark/requirements.txt
    python benchmark/speed.py cartpole --peers-python peers/bin/python    # minutes each; close everything else first
    python benchmark/speed.py flappy --peers-python peers/bin/python
    python benchmark/speed.py atari --peers-python peers/bin/python
    python benchmark/plot.py                                              # the tables in README.md

Writes <game>.json into speed/. The programs take turns, so that a slow moment of the machine meets all of them.
Measured: the seconds and peak memory of the whole process, with imports, compiling and, for ours, checkpoints,
TensorBoard, evaluation and agent.gif (on pixels, 100 steps of it), "warm" being a second run with what the first one
compiled; and on pixels frames per second without the first update, which compiles. Theirs on pixels: CnnPolicy,
8 environments, 4 epochs, minibatches of 256, the libraries' own wrappers; on CartPole the RL Zoo's settings.
"""

# argparse and NumPy alone, since this file also runs in the peers' environment.
import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from reference import HERE, ROOT, machine, read_table, write_json

FRAMES = {"cartpole": 100_000, "flappy": 10_240, "atari": 10_240}  # of a training; ours: rounded to whole updates
# The RL Zoo's settings for CartPole (its hyperparams/ppo.yml) in the flags of ppo_cartpole.py.
ZOO = ("--num-envs", "8", "--num-steps", "32", "--num-minibatches", "1", "--update-epochs", "20",
       "--learning-rate", "1e-3", "--gamma", "0.98", "--gae-lambda", "0.8", "--clip-coef", "0.2",
       "--vf-coef", "0.5", "--ent-coef", "0")  # fmt: skip
PEERS = {"sbx": "SBX", "stable_baselines3": "Stable-Baselines3"}


# ------------------------------------------------------------------------------------------------- theirs


def peer_on_cartpole(ppo):
    """{"eval_return"} of a peer's PPO with the RL Zoo's settings."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    model = ppo(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=1), n_steps=32, n_epochs=20, batch_size=256, gamma=0.98,
        gae_lambda=0.8, learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, ent_coef=0.0,
        seed=1,
    )  # fmt: skip
    model.learn(FRAMES["cartpole"])
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 1, seed=1001), n_eval_episodes=20)
    return {"eval_return": float(mean)}


def peer_on_pixels(ppo, envs, frames):
    """{"training": frames per second} of a peer's PPO."""
    model = ppo("CnnPolicy", envs, n_steps=128, n_epochs=4, batch_size=256)
    model.learn(1024)  # one update, with the compiling
    began = time.perf_counter()
    model.learn(frames - 1024)
    return {"training": (frames - 1024) / (time.perf_counter() - began)}


def stock_envs(game):
    """8 environments as people make them with Gymnasium's and Stable-Baselines3's own wrappers."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")
    import gymnasium as gym
    from gymnasium import wrappers
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

    if game == "atari":
        gym.register_envs(importlib.import_module("ale_py"))
        return VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=8, seed=0), 4)
    importlib.import_module("flappy_bird_gymnasium")  # registers the environment

    def make_env():
        env = gym.make("FlappyBird-v0", render_mode="rgb_array", use_lidar=False, background=None)
        env = wrappers.AddRenderObservation(env, render_only=True)
        env = wrappers.ResizeObservation(wrappers.GrayscaleObservation(env), (84, 84))
        return wrappers.FrameStackObservation(env, 4)

    return DummyVecEnv([make_env] * 8)


def run_peer(game, library):
    ppo = importlib.import_module(library).PPO
    return peer_on_cartpole(ppo) if game == "cartpole" else peer_on_pixels(ppo, stock_envs(game), FRAMES[game])


# --------------------------------------------------------------------------------------- where the time goes


class Stopwatch:
    """Seconds by name; a timed function inside a timed function counts for the outer one alone."""

    def __init__(self):
        self.seconds, self.busy = {}, False

    def timed(self, name, function, first=None, finish=lambda result: result):
        """`function`, its time added to `name`; that of the first call to `first`. finish: waits for a result."""
        names = [name, first or name]

        def wrapper(*args, **kwargs):
            if self.busy:
                return function(*args, **kwargs)
            self.busy, began, here = True, time.perf_counter(), names.pop() if len(names) > 1 else name
            try:
                return finish(function(*args, **kwargs))
            finally:
                self.seconds[here] = self.seconds.get(here, 0.0) + time.perf_counter() - began
                self.busy = False

        return wrapper


def take_apart(game):
    """Train with the script's own functions, timed: {"frames", "parts": {part: seconds}}, without Python's start.

    JAX works in the background; here every call is waited for, which the script does anyway.
    """
    watch, began = Stopwatch(), time.perf_counter()
    sys.path.insert(0, str(ROOT))
    script = watch.timed("imports", importlib.import_module)(f"ppo_{game}")
    jit, make_envs, wait = script.jax.jit, script.make_envs, script.jax.block_until_ready

    def timed_jit(function, **kwargs):
        name = getattr(function, "func", function).__name__  # of a partial: what it is a part of
        name = {"act": "policy", "update": "update"}.get(name, "all else")
        return watch.timed(name, jit(function, **kwargs), first="compile", finish=wait)

    def timed_envs(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        envs.step = watch.timed("environment", envs.step)
        return envs

    script.jax.jit, script.make_envs = timed_jit, timed_envs
    script.report = watch.timed("evaluation and agent.gif", script.report)
    script.save_checkpoint = watch.timed("checkpoints", script.save_checkpoint)
    script.Recorder.record = watch.timed("metrics and TensorBoard", script.Recorder.record)
    flags = [] if game == "cartpole" else ["--eval-episodes", "1", "--eval-max-steps", "1000"]
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        run = ["--total-frames", str(FRAMES[game]), "--run-dir", str(Path(folder) / "run"), *flags]
        frames = script.train(script.parse_args(run))["frames"]
    rest = time.perf_counter() - began - sum(watch.seconds.values())
    watch.seconds["all else"] = watch.seconds.get("all else", 0.0) + rest
    return {"frames": frames, "parts": {part: round(seconds, 3) for part, seconds in watch.seconds.items()}}


# ------------------------------------------------------------------------------------------ whole processes


def measure(command, cache=None):
    """Run a command to its end: ({"seconds", "peak_mib"}, what it printed)."""
    environment = os.environ | ({"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {})
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)  # the only wait that tells this child's peak memory
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{text[-2000:]}")
    peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)  # bytes on macOS, else KiB
    return {"seconds": round(seconds, 2), "peak_mib": round(peak, 1)}, text


def ours(game, flags=(), warm=False):
    """The figures of our script; warm: of a second run, with what a first one compiled."""
    flags = [*flags] if game == "cartpole" else ["--eval-episodes", "1", "--eval-max-steps", "100"]
    command = [sys.executable, ROOT / f"ppo_{game}.py", "--total-frames", FRAMES[game], *flags]
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        folder = Path(folder)
        for name in ("first", "second")[: 1 + warm]:
            found, _ = measure([*command, "--run-dir", folder / name], folder / "cache")
        table = read_table(folder / name / "metrics.csv")
        result = json.loads((folder / name / "result.json").read_text())
    if game == "cartpole":
        return found | {"eval_return": result["eval_return_mean"]}
    return found | {"training": round(np.ptp(table["frames"]) / np.ptp(table["seconds"]), 1)}


def in_a_process(python, game, what):
    """The figures of a peer, or of `take_apart`, in a process of its own."""
    found, text = measure([python, __file__, game, "--only", what])
    return found | json.loads(text.strip().splitlines()[-1])


def compare(game, peers_python, repeats):
    """{program: {figure: median, "all": every measurement}}, the programs in turn; SBX on pixels once: it is slow."""
    name = f"`ppo_{game}.py`"
    programs = {name: partial(ours, game), f"{name}, warm": partial(ours, game, warm=True)}
    if game == "cartpole":
        programs[f"{name}, RL Zoo settings"] = partial(ours, game, ZOO)
    if peers_python:
        programs |= {peer: partial(in_a_process, peers_python, game, library) for library, peer in PEERS.items()}
    runs = {name: [] for name in programs}
    for repeat in range(repeats):
        for name, run in programs.items():
            if repeat == 0 or game == "cartpole" or name != "SBX":
                runs[name].append(run())
                print(name, runs[name][-1], flush=True)
    return {
        name: {figure: statistics.median(run[figure] for run in found) for figure in found[0]} | {"all": found}
        for name, found in runs.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=FRAMES)
    parser.add_argument("--peers-python", type=Path, help="Python of the environment of benchmark/requirements.txt")
    parser.add_argument("--repeats", type=int, default=3, help="of each program; 0: only where the time goes")
    parser.add_argument("--only", help="used by this program itself: measure this in this process, print JSON")
    args = parser.parse_args()
    if args.only:
        found = take_apart(args.game) if args.only == "take-apart" else run_peer(args.game, args.only)
        print(json.dumps(found))
        return
    if args.peers_python and not args.peers_python.exists():
        parser.error(f"--peers-python {args.peers_python} is not there")
    path = HERE / "speed" / f"{args.game}.json"
    path.parent.mkdir(exist_ok=True)
    content = json.loads(path.read_text()) if path.exists() else {}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    if args.repeats:
        compared = compare(args.game, args.peers_python, args.repeats)
        content["compared"] = about | {"frames": FRAMES[args.game], "repeats": args.repeats, "programs": compared}
    content["taken_apart"] = about | in_a_process(sys.executable, args.game, "take-apart")
    print(content["taken_apart"]["parts"])
    write_json(path, content)


if __name__ == "__main__":
    main()
