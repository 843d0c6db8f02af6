"""Frames per second on Flappy Bird's pixels: ours beside Gymnasium's stock wrappers and Stable-Baselines3.

    python benchmark/flappy_speed.py --peers-python peers/bin/python     # three minutes; writes flappy_speed.json

A frame is a decision. Measured: the environments alone, 16 of them in one process with random actions, and
training, compile time apart. The stock way is gymnasium's AddRenderObservation, GrayscaleObservation,
ResizeObservation and FrameStackObservation, learned by Stable-Baselines3's PPO with CnnPolicy, 8 environments,
4 epochs and minibatches of 256. Ours is ppo_flappy.py with its defaults. Close everything else first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reference import HERE, ROOT, machine, write_json

REPEATS = 3


def random_play_speed(envs, steps):
    """Frames per second of a vector environment under actions that flap once in 16."""
    import numpy as np

    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    began = time.perf_counter()
    for _ in range(steps):
        envs.step((rng.random(envs.num_envs) < 1 / 16).astype(int))
    return steps * envs.num_envs / (time.perf_counter() - began)


def ours():
    """{"environment": [frames/s], "training": [frames/s]} of ppo_flappy.py."""
    sys.path.insert(0, str(ROOT))
    import ppo_flappy

    envs = ppo_flappy.make_envs(ppo_flappy.Config(), 16)
    speeds = {"environment": [random_play_speed(envs, 500) for _ in range(REPEATS)], "training": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--total-frames", "20480", "--eval-episodes", "1", "--run-dir", str(Path(folder) / "run")]
            result = ppo_flappy.train(ppo_flappy.parse_args(flags))
        speeds["training"].append(result["sps"])
    return speeds


def stock():
    """The same with stock wrappers and Stable-Baselines3; runs in the peers' environment."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")
    import flappy_bird_gymnasium  # noqa: F401 (registers the environment)
    import gymnasium as gym
    from gymnasium import wrappers
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    def make_env():
        env = gym.make("FlappyBird-v0", render_mode="rgb_array", use_lidar=False, background=None)
        env = wrappers.AddRenderObservation(env, render_only=True)
        env = wrappers.ResizeObservation(wrappers.GrayscaleObservation(env), (84, 84))
        return wrappers.FrameStackObservation(env, 4)

    envs = gym.vector.SyncVectorEnv([make_env] * 16)
    speeds = {"environment": [random_play_speed(envs, 20) for _ in range(REPEATS)], "training": []}
    for _ in range(REPEATS):
        settings = {"n_steps": 128, "n_epochs": 4, "batch_size": 256}
        model = PPO("CnnPolicy", DummyVecEnv([make_env] * 8), **settings)
        began = time.perf_counter()
        model.learn(2048)
        speeds["training"].append(2048 / (time.perf_counter() - began))
    return speeds


def measure(python, what):
    """`ours` or `stock` in a process of its own."""
    done = subprocess.run([python, __file__, "--only", what], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="interpreter of the environment of benchmark/requirements.txt")
    parser.add_argument("--only", choices=("ours", "stock"), help="used by this program itself")
    args = parser.parse_args()
    if args.only:
        print(json.dumps({"ours": ours, "stock": stock}[args.only]()))
        return
    content = {"unit": "frames per second", "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    content["ours"] = measure(sys.executable, "ours")
    if args.peers_python:
        content["stock"] = measure(args.peers_python, "stock")
    write_json(HERE / "flappy_speed.json", content)
    print(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
