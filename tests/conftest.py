"""What the tests share: the repository root on sys.path, small environments, small configs and one run per script."""
# ruff: noqa: E402 (JAX reads the environment when it is imported)

import csv
import os
import sys
import tempfile
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Before JAX is imported. One folder of compiled programs serves all tests and the processes they start.
_compiled = tempfile.TemporaryDirectory(prefix="ppo-tests-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Programs that run for a moment are compiled quickly rather than well; not so where the numbers are what is tested.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
OPTIMIZED = ("test_gae", "test_loss", "test_update", "test_learning")

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_cartpole as ppo

SCRIPTS = {name: import_module(f"ppo_{name}") for name in ("cartpole", "flappy", "atari")}
SCRIPTS = {name: module for name, module in SCRIPTS.items() if hasattr(module, "Categorical")}


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
        reward = {"action": float(action), "nan": np.nan if over else 1.0}.get(self.reward, 1.0)
        obs = np.full(1, np.nan, np.float32) if over and self.reward == "nan obs" else self.count.copy()
        return obs, reward, over and self.end == "terminated", over and self.end == "truncated", {}


class Draw(gym.Env):
    """Observes a number drawn at the start, and notes every seed it gets. 3 steps an episode."""

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
    name = "Counter" + "".join(f"-{key}-{value}" for key, value in sorted(kwargs.items())).replace(" ", "_") + "-v0"
    if name not in gym.registry:
        gym.register(name, entry_point=Counter, kwargs=kwargs)
    return name


gym.register("Draw-v0", entry_point=Draw)


class SmallNetwork(nn.Module):
    """Stands in for the networks of the scripts: of pictures it sees a few pixels of the newest; no hidden layer."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = obs[:, ::12, ::12, -1].reshape(len(obs), -1) / 255.0 if obs.ndim == 4 else obs.astype(jnp.float32)
        return nn.Dense(self.num_actions, name="policy")(x), nn.Dense(1, name="value")(x)[:, 0]


def tiny(script=ppo, **changes):
    """A Config that runs in a moment: 6 updates of 2 environments * 4 steps. Its shapes are compiled once."""
    settings = dict(num_envs=2, num_steps=4, num_minibatches=2, update_epochs=2, total_frames=48)
    settings |= dict(checkpoint_every=2, eval_episodes=2, eval_max_steps=20)
    return script.Config(**settings | changes)


FRAMES = [8, 16, 24, 32, 40, 48]  # of tiny's updates


def linear(params, obs):
    """The smallest policy and value function: both linear in the observation."""
    return obs @ params["policy"], obs @ params["value"]


def random_rollout(script, config, seed=7, features=3):
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
    rollout = script.Rollout(
        obs=obs, action=rng.integers(2, size=shape).astype(np.int32), log_prob=-np.abs(log_prob), value=value,
        reward=reward, terminated=done & (rng.random(shape) < 0.5), done=done, valid=valid,
    )  # fmt: skip
    return rollout, rng.normal(size=(envs, features)).astype(np.float32)


def initial_state(script, config, seed=0, features=3):
    """A TrainState for `linear`; one of its parameters has no use."""
    rng = np.random.default_rng(seed)
    params = {"policy": 0.1 * rng.normal(size=(features, 2)), "value": 0.1 * rng.normal(size=features)}
    params["unused"] = 0.1
    params = jax.tree.map(jnp.float32, params)
    return script.TrainState(params, script.make_optimizer(config).init(params), jax.random.key(seed), jnp.int32(0))


@cache
def updater(script, config, apply_fn=linear):
    """update, compiled once for every config."""
    return jax.jit(partial(script.update, config, apply_fn, script.make_optimizer(config)))


def idle(params, obs):
    """A policy of two equally likely actions, and a value that is the first number of the observation."""
    return jnp.zeros((len(obs), 2)), jnp.asarray(obs, jnp.float32)[:, 0]


@cache
def actor(apply_fn):
    return jax.jit(partial(ppo.act, apply_fn))


def collect(config, envs, apply_fn=idle, rollouts=1, seed=0):
    """Play with ppo.rollout. Returns a list of (Rollout, next obs, [(return, length) of the ended episodes])."""
    state = ppo.TrainState({}, (), jax.random.key(seed), jnp.int32(0))
    (obs, _), ended, played = envs.reset(seed=seed), np.zeros(config.num_envs, bool), []
    for _ in range(rollouts):
        data, state, obs, ended = ppo.rollout(config, actor(apply_fn), envs, state, obs, ended)
        played.append((data, np.array(obs), list(zip(envs.return_queue, envs.length_queue))))
        envs.return_queue.clear()
        envs.length_queue.clear()
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


def frames_of(run_dir):
    return [int(row["frames"]) for row in read_metrics(run_dir)]


def without_times(rows):
    return [{name: cell for name, cell in row.items() if name not in ("seconds", "charts/SPS")} for row in rows]


def events_of(run_dir):
    """{tag: [(step, value)]} of the TensorBoard files of a run, as TensorBoard shows them."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def load_state(script, run_dir, config):
    """The TrainState of a run's checkpoint."""
    envs = script.make_envs(config, 1)
    network = script.ActorCritic(int(envs.single_action_space.n))
    start = partial(script.init_state, network, script.make_optimizer(config))
    return script.load_checkpoint(Path(run_dir), jax.eval_shape(start, envs.observation_space.sample(), 0))[0]


def assert_same(state, other):
    """Bit by bit, keys too."""
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for leaf, other_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(other)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other_leaf = jax.random.key_data(leaf), jax.random.key_data(other_leaf)
        assert leaf.dtype == other_leaf.dtype
        np.testing.assert_array_equal(leaf, other_leaf)


class Stop(BaseException):
    """Stands for a SIGKILL: nothing in the scripts catches it."""


def die_in(script, config, name, at, owner=None):
    """Train until the at-th call of a function has returned, and die there."""
    owner = owner or script
    function, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(None)
        if len(calls) == at:
            raise Stop
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(owner, name, dying)
        script.train(config)


@pytest.fixture(autouse=True)
def optimize(request):
    quick = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", quick and request.module.__name__ not in OPTIMIZED)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(params=["cartpole", "atari"])
def script(request, monkeypatch):
    """CartPole and Atari in turn: what test_project does not find to be of one text. (Flappy Bird's is CartPole's.)
    Those that see pictures get a small network and draw few steps, to be quick."""
    module = SCRIPTS[request.param]
    if request.param != "cartpole":
        evaluate = module.evaluate

        def shorter(config, *args):
            return evaluate(replace(config, eval_max_steps=min(config.eval_max_steps, 20)), *args)

        monkeypatch.setattr(module, "ActorCritic", SmallNetwork)
        monkeypatch.setattr(module, "evaluate", shorter)
    return module


only_cartpole = pytest.mark.parametrize("script", ["cartpole"], indirect=True)  # the same text in all scripts
every_script = pytest.mark.parametrize("script", SCRIPTS, indirect=True)
_finished = {}


@pytest.fixture
def finished(script, tmp_path_factory):
    """(config, result) of a finished run of the script; its directory is config.run_dir. Only to be read."""
    if script not in _finished:
        config = tiny(script, total_frames=53, seed=3, run_dir=tmp_path_factory.mktemp("runs") / script.__name__)
        _finished[script] = config, script.train(config)
    return _finished[script]


@pytest.fixture
def command(script, capsys, monkeypatch):
    """command(*args) runs a command line of the script, or a Config: (exit code, stdout's lines, stderr's lines)."""

    def run(*args, config=None):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if config:
                patch.setattr(script, "parse_args", lambda args: config)
            code = script.main([str(arg) for arg in args])
        streams = capsys.readouterr()
        return code, streams.out.splitlines(), streams.err.splitlines()

    return run


@pytest.fixture
def refused(command, tmp_path):
    """refused(*args) runs a command line that has to be refused, touching nothing, and returns its one line."""

    def listing():
        return {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}

    def run(*args):
        before = listing()
        code, _, (line,) = command(*args)
        assert code == 2 and line.startswith("error: "), line
        assert listing() == before
        return line

    return run
