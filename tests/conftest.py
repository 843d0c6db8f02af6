"""What the tests share: the repository root on sys.path, small environments, small configs and one small run."""
# ruff: noqa: E402 (JAX reads the environment when it is imported)

import csv
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Before JAX is imported. One folder of compiled programs serves all tests and the processes they start.
_compiled = tempfile.TemporaryDirectory(prefix="ppo-tests-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_cartpole as ppo


class Counter(gym.Env):
    """Observes the number of steps of this episode. Ends after `length` of them, by `end`. Reward 1 each step."""

    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # which it cannot, so there is no agent.gif

    def __init__(self, length=3, end="terminated", dtype="float32", reward="one", render_mode=None):
        self.observation_space = gym.spaces.Box(0, 200, (1,), np.dtype(dtype))
        self.length, self.end, self.reward = length, end, reward
        self.count = np.zeros(1, dtype)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count[0] = 0
        return self.count.copy(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not an action"
        self.count[0] += 1
        over = bool(self.count[0] >= self.length)
        reward = {"one": 1.0, "action": float(action), "nan": np.nan if over else 1.0}[self.reward]
        return self.count.copy(), reward, over and self.end == "terminated", over and self.end == "truncated", {}


class Draw(gym.Env):
    """Observes a number drawn at the start, and notes every seed it gets. One action; 3 steps an episode."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    seeds = []

    def __init__(self, render_mode=None):
        pass

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            Draw.seeds.append(seed)
        self.number, self.count = self.np_random.random(1, dtype=np.float32), 0
        return self.number.copy(), {}

    def step(self, action):
        self.count += 1
        return self.number.copy(), float(self.number[0]), self.count == 3, False, {}


class Odd(gym.Env):
    """An environment with the spaces of your choice, which nobody will ever play."""

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space


def counter(*args, **kwargs):
    """The id of a registered Counter(*args, **kwargs)."""
    kwargs |= dict(zip(("length", "end"), args))
    name = "Counter" + "".join(f"-{key}-{value}" for key, value in sorted(kwargs.items())) + "-v0"
    if name not in gym.registry:
        gym.register(name, entry_point=Counter, kwargs=kwargs)
    return name


gym.register("Draw-v0", entry_point=Draw)


def tiny(**changes):
    """A Config that runs in a moment: 6 updates of 2 environments * 4 steps."""
    settings = dict(num_envs=2, num_steps=4, num_minibatches=2, update_epochs=2, total_frames=48)
    settings |= dict(checkpoint_every=2, eval_episodes=2, eval_max_steps=20)
    return ppo.Config(**settings | changes)


def linear(params, obs):
    """The smallest policy and value function: both linear in the observation."""
    return obs @ params["policy"], obs @ params["value"]


def random_rollout(config, seed=0, features=3):
    """(Rollout, next observations) with ends of both kinds and reset rows; obs[..., 0] numbers the rows."""
    rng = np.random.default_rng(seed)
    steps, envs = shape = (config.num_steps, config.num_envs)
    obs = rng.normal(size=(*shape, features)).astype(np.float32)
    obs[..., 0] = np.arange(steps * envs).reshape(shape)
    done = rng.random(shape) < 0.3
    valid = np.ones(shape, bool)
    for t in range(1, steps):
        valid[t] = ~done[t - 1]
        done[t] &= valid[t]
    log_prob, value, reward = rng.normal(size=(3, *shape)).astype(np.float32)
    rollout = ppo.Rollout(
        obs=obs, action=rng.integers(2, size=shape).astype(np.int32), log_prob=-np.abs(log_prob), value=value,
        reward=reward, terminated=done & (rng.random(shape) < 0.5), done=done, valid=valid,
    )  # fmt: skip
    return rollout, rng.normal(size=(envs, features)).astype(np.float32)


def initial_state(config, seed=0, features=3):
    rng = np.random.default_rng(seed)
    params = {"policy": 0.1 * rng.normal(size=(features, 2)), "value": 0.1 * rng.normal(size=features)}
    params = jax.tree.map(jnp.float32, params)
    return ppo.TrainState(params, ppo.make_optimizer(config).init(params), jax.random.key(seed), jnp.int32(0))


def idle(params, obs):
    """A policy of two equally likely actions, and a value that is the first number of the observation."""
    return jnp.zeros((len(obs), 2)), jnp.asarray(obs, jnp.float32)[:, 0]


def collect(config, envs, apply_fn=idle, rollouts=1, seed=0, keep=np.array):
    """Play with ppo.rollout. Returns a list of (Rollout, next obs, episodes); of its arrays, what `keep` makes."""
    act_fn = jax.jit(partial(ppo.act, apply_fn))
    state = ppo.TrainState({}, (), jax.random.key(seed), jnp.int32(0))
    buffer = ppo.make_buffer(config, envs.observation_space)
    (obs, _), ended, played = envs.reset(seed=seed), np.zeros(config.num_envs, bool), []
    for _ in range(rollouts):
        state, buffer, data, obs, ended, episodes = ppo.rollout(config, act_fn, envs, state, buffer, obs, ended)
        played.append((jax.tree.map(keep, data), np.array(obs), episodes))
    return played


def gae_by_definition(rewards, values, next_value, terminated, done, gamma, gae_lambda):
    """A[t] = sum over l of (gamma * lambda)^l * delta[t + l], up to the step that ends the episode."""
    steps, envs = np.shape(rewards)
    advantages = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                after = next_value[n] if k == steps - 1 else values[k + 1][n]
                after = 0.0 if terminated[k][n] else after
                advantages[t, n] += weight * (rewards[k][n] + gamma * after - values[k][n])
                weight *= gamma * gae_lambda
                if done[k][n]:
                    break
    return advantages


def read_metrics(run_dir):
    """The rows of metrics.csv as dicts of text."""
    with open(Path(run_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_times(rows):
    return [{name: cell for name, cell in row.items() if name not in ("seconds", "charts/SPS")} for row in rows]


def load_state(run_dir, config):
    """The TrainState of the newest checkpoint."""
    envs = ppo.make_envs(config, config.num_envs)
    like = ppo.init_state(ppo.make_network(envs), ppo.make_optimizer(config), envs.reset()[0], 0)
    return ppo.load_checkpoint(Path(run_dir), like)[0]


def leaves(state):
    """All numbers of a TrainState, as a list of NumPy arrays."""
    if isinstance(state, ppo.TrainState):
        state = state._replace(key=jax.random.key_data(state.key))
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(state, other):
    """Bit by bit."""
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for leaf, other_leaf in zip(leaves(state), leaves(other)):
        assert leaf.dtype == other_leaf.dtype
        np.testing.assert_array_equal(leaf, other_leaf)


@pytest.fixture(scope="session")
def cartpole_run(tmp_path_factory):
    """(config, result) of a finished CartPole run; its directory is config.run_dir. Only to be read."""
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    config = tiny(num_envs=4, num_steps=16, total_frames=6 * 64 + 5, seed=3, run_dir=str(run_dir))
    return config, ppo.train(config)
