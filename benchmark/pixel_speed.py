"""Frames per second on pixels: ours beside Stable-Baselines3 and SBX with the stock wrappers, on the same machine.

    python benchmark/pixel_speed.py flappy --peers-python peers/bin/python   # minutes; writes flappy_speed.json
    python benchmark/pixel_speed.py atari --peers-python peers/bin/python      # the same; writes atari_speed.json

A frame is a decision. Measured: the environments alone, in one process with random actions, and training,
compile time apart; ours and theirs in turn. Ours are the scripts with their defaults. Theirs is PPO with
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

from reference import HERE, ROOT, machine, write_json

REPEATS = 3
SCRIPTS = {"flappy": "ppo_flappy", "atari": "ppo_atari"}


def random_play_speed(step, num_envs, steps, actions):
    """Frames per second of num_envs environments; an action is 0 in all but 1/16 of the cases, as birds flap."""
    import numpy as np

    rng = np.random.default_rng(0)
    began = time.perf_counter()
    for _ in range(steps):
        step(np.where(rng.random(num_envs) < 1 / 16, rng.integers(0, actions, num_envs), 0))
    return steps * num_envs / (time.perf_counter() - began)


def ours(game):
    """(frames/s of the environments, of training) with our script."""
    sys.path.insert(0, str(ROOT))
    ppo = importlib.import_module(SCRIPTS[game])
    config = ppo.Config()
    ppo.check_env(config)
    envs = ppo.make_envs(config, config.num_envs)
    envs.reset(seed=0)
    environment = random_play_speed(envs.step, config.num_envs, 500, envs.single_action_space.n)
    envs.close()
    with tempfile.TemporaryDirectory() as folder:
        frames = 10 * config.batch_size
        flags = ["--total-frames", str(frames), "--eval-episodes", "1", "--eval-max-steps", "100"]
        return environment, ppo.train(ppo.parse_args([*flags, "--run-dir", str(Path(folder) / "run")]))["sps"]


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


def stock(game, library="stable_baselines3"):
    """(frames/s of the environments, of training) with Stable-Baselines3, or SBX, its JAX twin."""
    PPO = importlib.import_module(library).PPO
    envs, frames = {"flappy": flappy_envs, "atari": atari_envs}[game](), 2048
    envs.reset()
    environment = random_play_speed(envs.step, 8, 60, envs.action_space.n)
    model = PPO("CnnPolicy", envs, n_steps=128, n_epochs=4, batch_size=256)
    model.learn(1024)  # one update, with the compiling
    began = time.perf_counter()
    model.learn(frames)
    return environment, frames / (time.perf_counter() - began)


def measure(python, game, what):
    """One of PROGRAMS in a process of its own: {"environment": frames/s, "training": frames/s, "peak_mib"}."""
    done = subprocess.run([python, __file__, game, "--only", what], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


PROGRAMS = {"ours": ours, "stock": stock, "sbx": partial(stock, library="sbx")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=SCRIPTS)
    parser.add_argument("--peers-python", help="interpreter of the environment of benchmark/requirements.txt")
    parser.add_argument("--only", choices=PROGRAMS, help="used by this program itself")
    args = parser.parse_args()
    if args.only:
        environment, training = PROGRAMS[args.only](args.game)
        unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, else in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        print(json.dumps({"environment": environment, "training": training, "peak_mib": peak}))
        return
    pythons = {"ours": sys.executable} | (
        {"stock": args.peers_python, "sbx": args.peers_python} if args.peers_python else {}
    )
    found = {what: {"environment": [], "training": [], "peak_mib": []} for what in pythons}
    for _ in range(REPEATS):
        for what, python in pythons.items():
            for name, value in measure(python, args.game, what).items():
                found[what][name].append(round(value, 1))
    content = {"unit": "frames per second", "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    write_json(HERE / f"{args.game}_speed.json", content | found)
    print(json.dumps(content | found, indent=2))


if __name__ == "__main__":
    main()
