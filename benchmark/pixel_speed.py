"""Speed on pixels: ours beside Stable-Baselines3 and SBX with the stock wrappers, on the same machine.

    python benchmark/pixel_speed.py flappy --peers-python peers/bin/python   # minutes; writes flappy_speed.json
    python benchmark/pixel_speed.py atari --peers-python peers/bin/python    # the same; writes atari_speed.json

A frame is a decision. Measured: frames per second of the environments alone, in one process with random actions;
frames per second of training, without compiling and the first update; and the seconds and peak memory of that whole
process, with imports, compiling and, for ours, checkpoints, TensorBoard, an evaluation of 100 steps and agent.gif.
Ours and theirs in turn; SBX once, since it is slow. Ours are the scripts with their defaults. Theirs is PPO with
CnnPolicy, 8 environments, 4 epochs and minibatches of 256; for Flappy Bird on Gymnasium's AddRenderObservation,
GrayscaleObservation, ResizeObservation and FrameStackObservation, for Atari (Pong) on the library's own
make_atari_env and VecFrameStack. Close everything else first.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from reference import HERE, ROOT, machine, peak_mib, read_table, write_json

FRAMES = 10_240  # of every training; ours are rounded down to whole updates
REPEATS = {"ours": 3, "stock": 3, "sbx": 1}
SCRIPTS = {"flappy": "ppo_flappy", "atari": "ppo_atari"}


def random_play_speed(step, num_envs, steps, actions):
    """Frames per second of num_envs environments; an action is 0 in all but 1/16 of the cases, as birds flap."""
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    for _ in range(steps):
        step(np.where(rng.random(num_envs) < 1 / 16, rng.integers(0, actions, num_envs), 0))
    return steps * num_envs / (time.perf_counter() - began)


def our_environments(game):
    """{"environment": frames per second of our environments alone}."""
    ppo, config = our_script(game)
    ppo.check_env(config)
    envs = ppo.make_envs(config, config.num_envs)
    envs.reset(seed=0)
    return {"environment": random_play_speed(envs.step, config.num_envs, 500, envs.single_action_space.n)}


def our_training(game):
    """{"training": frames per second with our script, "frames": all it played}, from its metrics.csv."""
    ppo, _ = our_script(game)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--total-frames", str(FRAMES), "--eval-episodes", "1", "--eval-max-steps", "100"]
        ppo.train(ppo.parse_args([*flags, "--run-dir", str(Path(folder) / "run")]))
        table = read_table(Path(folder) / "run" / "metrics.csv")
    return {"training": np.ptp(table["frames"]) / np.ptp(table["seconds"]), "frames": table["frames"][-1]}


def our_script(game):
    """(the script as a module, its default settings)."""
    sys.path.insert(0, str(ROOT))
    ppo = importlib.import_module(SCRIPTS[game])
    return ppo, ppo.Config()


def flappy_envs():
    """8 games with the stock wrappers, one after the other."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")
    import flappy_bird_gymnasium  # noqa: F401 (registers the environment)
    import gymnasium as gym
    from gymnasium import wrappers
    from stable_baselines3.common.vec_env import DummyVecEnv

    def make_env():
        env = gym.make("FlappyBird-v0", render_mode="rgb_array", use_lidar=False, background=None)
        env = wrappers.AddRenderObservation(env, render_only=True)
        env = wrappers.ResizeObservation(wrappers.GrayscaleObservation(env), (84, 84))
        return wrappers.FrameStackObservation(env, 4)

    return DummyVecEnv([make_env] * 8)


def atari_envs():
    """8 games of Pong as Stable-Baselines3 makes them."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=8, seed=0), 4)


STOCK_ENVS = {"flappy": flappy_envs, "atari": atari_envs}


def stock_environments(game):
    """{"environment": frames per second of the stock environments alone}."""
    envs = STOCK_ENVS[game]()
    envs.reset()
    return {"environment": random_play_speed(envs.step, 8, 60, envs.action_space.n)}


def stock_training(game, library):
    """{"training": frames per second with Stable-Baselines3, or SBX, its JAX twin, "frames": all it played}."""
    PPO = importlib.import_module(library).PPO
    model = PPO("CnnPolicy", STOCK_ENVS[game](), n_steps=128, n_epochs=4, batch_size=256)
    model.learn(1024)  # one update, with the compiling
    began = time.perf_counter()
    model.learn(FRAMES - 1024)
    return {"training": (FRAMES - 1024) / (time.perf_counter() - began), "frames": FRAMES}


PROGRAMS = {
    "ours": {"environment": our_environments, "training": our_training},
    "stock": {"environment": stock_environments, "training": partial(stock_training, library="stable_baselines3")},
    "sbx": {"environment": stock_environments, "training": partial(stock_training, library="sbx")},
}


def measure(python, game, who):
    """Both parts of one of PROGRAMS, each in a process of its own: {what: figure}."""
    found = {}
    for part in PROGRAMS[who]:
        began = time.monotonic()
        command = [python, __file__, game, "--only", who, part]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found["seconds"] = time.monotonic() - began  # of the last, the training
        found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=SCRIPTS)
    parser.add_argument("--peers-python", help="interpreter of the environment of benchmark/requirements.txt")
    parser.add_argument("--only", nargs=2, metavar=("WHO", "PART"), help="used by this program itself")
    args = parser.parse_args()
    if args.only:
        who, part = args.only
        found = PROGRAMS[who][part](args.game)
        print(json.dumps(found | {"peak_mib": peak_mib(resource.getrusage(resource.RUSAGE_SELF))}))
        return
    pythons = {"ours": sys.executable}
    if args.peers_python:
        pythons |= {"stock": args.peers_python, "sbx": args.peers_python}
    found = {who: {} for who in pythons}
    for repeat in range(max(REPEATS.values())):
        for who in [who for who in pythons if repeat < REPEATS[who]]:
            for name, value in measure(pythons[who], args.game, who).items():
                found[who].setdefault(name, []).append(round(value, 1))
            print(who, {name: values[-1] for name, values in found[who].items()}, flush=True)
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    write_json(HERE / f"{args.game}_speed.json", about | found)


if __name__ == "__main__":
    main()
