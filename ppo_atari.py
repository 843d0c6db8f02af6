# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax>=0.10,<0.13",
#   "flax>=0.12.8,<0.13",
#   "optax>=0.2.8,<0.3",
#   "gymnasium>=1.4,<1.5",
#   "ale-py>=0.12.1,<0.13",
#   "flappy-bird-gymnasium>=0.4,<0.5",
#   "tyro>=1.0.17,<1.1",
#   "tensorboard>=2.21,<2.22",
#   "tqdm>=4.70,<5",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games, in one file: JAX, Flax and Optax, on one device or many.

    python ppo_atari.py --env-id ALE/Breakout-v5        # train, evaluate, draw agent.gif
    python ppo_atari.py --resume runs/NAME              # go on after a kill or Ctrl-C
    python ppo_atari.py --evaluate runs/NAME            # play the agent of a run
    srun --ntasks=4 python ppo_atari.py --distributed --num-envs 512        # four processes, one run
    tensorboard --logdir runs                           # look at the curves

One frame is one decision of the agent in one environment: four frames of the emulator. All local devices take
part; the environments are spread over them.

PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347
Generalized advantage estimation (GAE): Schulman et al. 2016, https://arxiv.org/abs/1506.02438
The details that matter: Huang et al. 2022, "The 37 Implementation Details of PPO", ICLR blog track
"""

import csv
import hashlib
import importlib.metadata
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ale_py
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from ale_py.vector_env import AtariVectorEnv
from flax import serialization
from flax.linen.initializers import orthogonal
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

EPISODE_COLUMNS = ("charts/episodic_return", "charts/episodic_length")  # what finished_episodes gives
CHART_COLUMNS = ("charts/SPS", "charts/learning_rate", "charts/clip_coef")
LOSS_COLUMNS = tuple(
    "losses/" + name
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
)
COLUMNS = ("frames", "seconds", *EPISODE_COLUMNS, *CHART_COLUMNS, *LOSS_COLUMNS)  # of metrics.csv
PART_ROWS = 32  # rows of a minibatch that a CPU takes at once; in trials on two cores faster than 16, 64, 128 or 256
PACKAGES = ("jax", "flax", "optax", "gymnasium", "ale-py")  # whose versions result.json names


@dataclass(frozen=True)
class Config:
    """Train a PPO agent, then evaluate it. Everything goes to a new directory under runs/."""

    env_id: str = "ALE/Pong-v5"  # any ALE/<Game>-v5
    seed: int = 1  # of parameters, actions, minibatches and environments: 0 to 2**32 - 1
    total_frames: int = 10_000_000  # decisions of the agent, all environments together; rounded down to whole updates
    num_envs: int = 8  # environments that play side by side, on all devices together
    num_steps: int = 128  # steps of each environment from one update to the next
    num_minibatches: int = 4  # parts into which the num_steps steps of each environment are shuffled
    update_epochs: int = 4  # passes over these rows
    learning_rate: float = 2.5e-4  # step size of Adam
    anneal: bool = True  # take learning rate and clip range linearly to zero over the run
    reward_scale: float = 1.0  # factor on the rewards (signs) that the learner sees; reported returns are raw
    gamma: float = 0.99  # discount: what a reward is worth one step before it comes
    gae_lambda: float = 0.95  # 0: advantages from one step and the value function; 1: from the whole return
    clip_coef: float = 0.1  # how far a probability ratio may move from 1 before it stops to pay
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus, which keeps the policy exploring
    max_grad_norm: float = 0.5  # longer gradients are scaled down to this norm
    repeat_action_probability: float = 0.0  # sticky actions: how often a frame repeats the last action instead
    checkpoint_every: int = 20  # updates from one checkpoint to the next
    eval_episodes: int = 10  # whole games of the evaluation at the end
    eval_max_steps: int = 27_000  # an evaluation game is cut here, if not by the emulator, and reported as capped
    eval_greedy: bool = True  # evaluate the most likely actions; else sampled ones, as in training
    distributed: bool = False  # one of several processes of one run; SLURM, Kubernetes or TPU pod say which
    coordinator_address: str | None = None  # host:port of process 0, where they do not
    num_processes: int | None = None  # of the run, where they do not
    process_id: int | None = None  # of this process, from 0, where they do not
    run_dir: str | None = None  # directory of this run; without it, a new one under runs/
    resume: str | None = None  # run directory to go on with, under the settings it was started with
    evaluate: str | None = None  # run directory whose agent is evaluated; nothing is trained

    @property
    def batch_size(self):
        return self.num_envs * self.num_steps

    @property
    def num_updates(self):
        return self.total_frames // self.batch_size


class UsageError(ValueError):
    """The user asked for something that cannot be done; the message says what, in one line."""


def flag(name):
    return "--" + name.replace("_", "-")


def check_config(config):
    """Raise UsageError, naming the flag, if `config` cannot be run."""
    for field in fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, (int, float) if field.type is float else field.type):
            raise UsageError(f"{flag(field.name)} must be {field.type}, got {value!r}")
        if field.type is int and field.name != "seed" and value < 1:
            raise UsageError(f"{flag(field.name)} must be at least 1, got {value}")
        if field.type is float and not 0 <= value < math.inf:
            raise UsageError(f"{flag(field.name)} must be a number from 0 up, got {value}")
    for name in ("learning_rate", "reward_scale", "clip_coef", "max_grad_norm"):
        if getattr(config, name) == 0:
            raise UsageError(f"{flag(name)} must be above 0")
    for name in ("gamma", "gae_lambda"):
        if getattr(config, name) > 1:
            raise UsageError(f"{flag(name)} must be at most 1, got {getattr(config, name)}")
    if not 0 <= config.seed < 2**32:
        raise UsageError(f"--seed must be from 0 to 2**32 - 1, got {config.seed}")
    rows = f"--num-envs {config.num_envs} * --num-steps {config.num_steps} = {config.batch_size}"
    if config.batch_size % config.num_minibatches:
        raise UsageError(f"--num-minibatches {config.num_minibatches} does not divide {rows} rows")
    if config.total_frames < config.batch_size:
        raise UsageError(f"--total-frames {config.total_frames} is less than one update of {rows} frames")


# ------------------------------------------------------------------------------------- environment


def check_env(config):
    """Raise UsageError unless `config.env_id` is an Atari game and the flags of this script alone fit together."""
    gym.register_envs(ale_py)
    try:
        known = re.fullmatch(r"ALE/\w+-v5", config.env_id) and gym.spec(config.env_id)
    except gym.error.Error as error:
        raise UsageError(f"--env-id {config.env_id}: {' '.join(str(error).split())}") from None
    if not known:
        raise UsageError(f"--env-id {config.env_id}: needs the form ALE/<Game>-v5, for example ALE/MsPacman-v5")
    if config.repeat_action_probability > 1:
        raise UsageError("--repeat-action-probability must be at most 1")
    if config.num_steps % config.num_minibatches:
        raise UsageError(f"--num-minibatches {config.num_minibatches} does not divide --num-steps {config.num_steps}")
    addressed = [config.coordinator_address, config.num_processes, config.process_id]
    if not config.distributed and addressed != [None] * 3:
        raise UsageError("--coordinator-address, --num-processes and --process-id need --distributed")


class AtariEnvs(gym.vector.VectorWrapper):
    """Atari games as the learner needs them, from games as they are.

    Observations are uint8 [N, 84, 84, 4], the newest picture last. The reward is the sign of the game's. The loss of
    a life counts as termination while the game goes on, as in OpenAI baselines; then FIRE is pressed in games
    that have it, since some (Breakout) wait for it. In info, beside the games' whole statistics:
    "reward" [N], the game's own; "game_over" [N], by itself or because it was "cut" [N] by the emulator's limit of
    108,000 frames; and "decided" [N], False where the agent's action was not played: FIRE was pressed in its
    place, or the game reset (NEXT_STEP).
    """

    def __init__(self, env, actions):
        """env: a vector environment of whole games with raw rewards. actions: the ale_py.Action of each index."""
        super().__init__(env)
        self.fire = actions.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in actions else None
        shape = np.moveaxis(np.empty(env.single_observation_space.shape, bool), 0, -1).shape
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)

    def observe(self, obs):
        """[N, 4, 84, 84] to [N, 84, 84, 4], in memory of its own."""
        return np.stack(obs.swapaxes(0, 1), axis=-1)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            seed = (seed + np.arange(self.num_envs)) % 2**31  # the emulator's seeds are 31 bits
        obs, info = self.env.reset(seed=seed, options=options)
        self.lives, (self.game_over, self.press) = info["lives"].copy(), np.zeros((2, self.num_envs), bool)
        return self.observe(obs), info

    def step(self, actions):
        decided = ~(self.game_over | self.press)
        actions = np.where(self.press, self.fire or 0, actions).astype(np.int32)
        obs, reward, game_over, truncated, info = self.env.step(actions)
        # 0 lives are not yet the end in some games (Qbert), and are the beginning in those that count none.
        life_lost = (info["lives"] < self.lives) & (info["lives"] > 0) & ~self.game_over
        self.lives, self.game_over = info["lives"].copy(), game_over | truncated
        self.press = life_lost & ~self.game_over & (self.fire is not None)
        info |= {"reward": reward, "game_over": self.game_over, "cut": truncated, "decided": decided}
        return self.observe(obs), np.sign(reward), game_over | life_lost, truncated & ~life_lost, info


def make_envs(config, num_envs, **picture):
    """`num_envs` games, stepped together by ale-py in C++ threads. picture: other settings of AtariVectorEnv.

    Each step is four frames of the emulator, the last two of them maximized; a game starts with up to 30 of doing
    nothing, and with FIRE where there is such an action.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    games = AtariVectorEnv(
        gym.spec(config.env_id).kwargs["game"],
        num_envs,
        num_threads=min(num_envs, cores),
        repeat_action_probability=config.repeat_action_probability,
        reward_clipping=False,  # AtariEnvs does, and reports raw returns
        **picture,
    )
    return AtariEnvs(gym.wrappers.vector.RecordEpisodeStatistics(games), games.ale.get_action_set())


def finished_episodes(info):
    """(return, length) of each episode that the step behind `info` ended."""
    if "episode" not in info:
        return []
    ended, stats = info["_episode"], info["episode"]
    return list(zip(stats["r"][ended].tolist(), stats["l"][ended].tolist()))


EVALUATION = 2**32 - 1  # the stream of seeds that training never uses


def env_seed(seed, stream):
    """The seed of a vector environment. Training that starts or resumes at update k uses stream k.

    The bare seed would not do: environment i is seeded with it + i, so run 2 would begin with the episodes of run 1.
    """
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


# ----------------------------------------------------------------------------------------- network


def conv_as_matmul(x, kernel, stride):
    """A convolution without padding, as one matrix product.

    x: [B, H, W, C]; kernel: [k, k, C, F], k a multiple of stride. Returns [B, (H - k) // stride + 1, ..., F].
    Blocks of stride x stride pixels become one pixel, so a kernel covers n x n whole pixels; the n * n shifted
    pictures, side by side, are the rows of the product.
    """
    k, _, c, f = kernel.shape
    n = k // stride
    h, w = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1  # of the result
    x = x[:, : (h + n - 1) * stride, : (w + n - 1) * stride]
    x = x.reshape(-1, h + n - 1, stride, w + n - 1, stride * c).swapaxes(2, 3)
    # stack, since XLA computes it in one loop with all before it, and concatenate(axis=-1) in one of its own.
    patches = jnp.stack([x[:, i : i + h, j : j + w] for i in range(n) for j in range(n)], axis=3)
    kernel = kernel.reshape(n, stride, n, stride, c, f).swapaxes(1, 2).reshape(-1, f)
    return matmul(patches.reshape(-1, h, w, len(kernel)), kernel)


@jax.custom_vjp
def matmul(x, kernel):
    """x @ kernel, [..., K] @ [K, F], with a faster gradient of kernel on a CPU."""
    return x @ kernel


def matmul_forward(x, kernel):
    return x @ kernel, (x, kernel)


def matmul_backward(saved, grad):
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    # x.T @ grad at twice the speed: XLA is fast where the long axis of the second matrix comes first, and the
    # barriers keep it from moving the transposes back.
    barrier = jax.lax.optimization_barrier
    return grad @ kernel.T, barrier(barrier(grads.T) @ rows).T


matmul.defvjp(matmul_forward, matmul_backward)


class Conv(nn.Module):
    """flax.linen.Conv without padding, with the same parameters, fast on a CPU too.

    XLA runs a convolution inside a scan on one core, some 30 times slower than it need be
    (https://github.com/jax-ml/jax/issues/12868).
    """

    features: int
    kernel_size: int
    stride: int

    @nn.compact
    def __call__(self, x):
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(math.sqrt(2)), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if jax.default_backend() == "cpu":
            return conv_as_matmul(x, kernel, self.stride) + bias
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=layout) + bias


class ActorCritic(nn.Module):
    """Policy and value of pictures, uint8 [B, 84, 84, 4]: logits [B, num_actions] and value [B], float32.

    The network of Mnih et al. 2015 (Nature 518, 529-533).
    """

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = obs.astype(jnp.float32) * (1 / 255)  # times, since division is slow
        for features, kernel_size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, kernel_size, stride)(x))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(512, kernel_init=orthogonal(math.sqrt(2)))(x))
        # A small last layer makes the first policy nearly uniform, so it explores.
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01), name="policy")(x)
        value = nn.Dense(1, kernel_init=orthogonal(1.0), name="value")(x)
        return logits, value.squeeze(-1)


def make_network(envs):
    return ActorCritic(num_actions=int(envs.single_action_space.n))


# --------------------------------------------------------------------------------------- algorithm


def compute_gae(rewards, values, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16), from the last step to the first.

    Step t got rewards[t] and ended its episode if done[t]: by termination (nothing comes after: the future
    is worth 0) where terminated[t], else by truncation (a time limit: the future is worth what the value
    function says of the last observation). values[t + 1] has to be the value of the observation that step t
    led to, and is, since NEXT_STEP environments return the last observation of an episode too. The row
    after done[t] is the reset, not a step: what is computed there reaches no other row; mask it.

    Args:
      rewards, values, terminated, done: [T, N], N environments for T steps.
      next_value: [N], the value of the observation after the last step.
      gamma, gae_lambda: floats in [0, 1].

    Returns:
      (advantages, returns), float32 [T, N]; returns are advantages + values, the targets of the value loss.
    """
    next_values = jnp.concatenate([values[1:], next_value[None]])
    deltas = rewards + gamma * next_values * (1.0 - terminated) - values

    def step(advantage, row):
        delta, ended = row
        advantage = delta + gamma * gae_lambda * (1.0 - ended) * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(next_value), (deltas, done), reverse=True)
    return advantages, advantages + values


class Batch(NamedTuple):
    """One minibatch of B rows."""

    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B] int32
    log_prob: jax.Array  # [B], of the action under the policy that chose it
    advantage: jax.Array  # [B]
    target: jax.Array  # [B], what the value should be
    valid: jax.Array  # [B], False in reset rows, which count in nothing


def action_log_probs(logits):
    """Log-probabilities [B, A]; finite even where a logit is -inf, so that p * log p is 0 and not NaN."""
    return jnp.maximum(jax.nn.log_softmax(logits), jnp.finfo(logits.dtype).min)


def ppo_loss(params, apply_fn, batch, clip_coef, vf_coef, ent_coef):
    """Clipped surrogate loss (arXiv 1707.06347, equations 7 and 9), averaged over the valid rows.

    Args:
      apply_fn: apply_fn(params, obs) -> (logits [B, A], value [B]).
      batch: Batch of B rows.

    Returns:
      (loss, metrics): a scalar, and a dict of scalars: policy_loss, value_loss, entropy, approx_kl
      (http://joschu.net/blog/kl-approx.html, k3) and clip_fraction.
    """
    logits, value = apply_fn(params, batch.obs)
    log_probs = action_log_probs(logits)
    log_prob = jnp.take_along_axis(log_probs, batch.action[:, None], axis=-1)[:, 0]
    num_valid = jnp.maximum(batch.valid.sum(), 1)

    def mean(x):
        return jnp.where(batch.valid, x, 0.0).sum() / num_valid

    advantage = batch.advantage - mean(batch.advantage)
    advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8)
    # exp overflows beyond 88, and inf * 0 in the gradient is NaN. A ratio of exp(20) is clipped anyway.
    log_ratio = jnp.clip(log_prob - batch.log_prob, -20.0, 20.0)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_coef, 1.0 + clip_coef)
    policy_loss = -mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage))
    value_loss = mean((value - batch.target) ** 2)
    entropy = mean(-(jnp.exp(log_probs) * log_probs).sum(-1))
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(ratio - 1.0 - log_ratio),
        "clip_fraction": mean(jnp.abs(ratio - 1.0) > clip_coef),
    }
    return policy_loss + vf_coef * value_loss - ent_coef * entropy, metrics


def ppo_gradient(params, apply_fn, batch, *coefficients):
    """jax.grad of ppo_loss, with its arguments: (gradients, shaped like params, and metrics, a dict of scalars).

    One CPU device takes them in parts of PART_ROWS rows, where these come out even. In each turn ppo_loss sees the
    whole minibatch, but the network runs on one part; the outputs of the other rows are constants, those of earlier
    turns or zeros. ppo_loss is a sum over rows, in which no row's term depends on the outputs of another, so the
    turns' gradients add up to that of the whole. The last turn, which knows all outputs, has the metrics.
    """
    num_parts, rest = divmod(len(batch.action), PART_ROWS)
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or num_parts < 2 or rest:
        return jax.grad(ppo_loss, has_aux=True)(params, apply_fn, batch, *coefficients)

    def add_part(carry, start):
        total, outputs = carry

        def loss_of_part(params):
            part = apply_fn(params, jax.lax.dynamic_slice_in_dim(batch.obs, start, PART_ROWS))
            known = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), outputs, part)
            loss, metrics = ppo_loss(params, lambda params, obs: known, batch, *coefficients)
            return loss, (known, metrics)

        grads, (outputs, metrics) = jax.grad(loss_of_part, has_aux=True)(params)
        return (optax.tree.add(total, grads), outputs), metrics

    zeros = jax.tree.map(jnp.zeros_like, (params, jax.eval_shape(apply_fn, params, batch.obs)))
    (grads, _), metrics = jax.lax.scan(add_part, zeros, PART_ROWS * jnp.arange(num_parts))
    return grads, jax.tree.map(lambda x: x[-1], metrics)


class TrainState(NamedTuple):
    """All that training carries from one update to the next, and a checkpoint keeps."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array  # typed PRNG key
    update: jax.Array  # int32, updates done


class Rollout(NamedTuple):
    """T steps of N environments, time-major [T, N, ...]."""

    obs: jax.Array  # what the agent saw
    action: jax.Array  # int32, what it did
    log_prob: jax.Array  # float32, of that action
    value: jax.Array  # float32, of that observation
    reward: np.ndarray  # float32, what it got
    terminated: np.ndarray  # bool, this step ended the episode for good
    done: np.ndarray  # bool, this step ended the episode by termination or truncation
    valid: np.ndarray  # bool, False where the environment reset instead of taking the action


def anneal_fraction(config, update):
    """The part of learning rate and clip range used in update 0, 1, ...: 1 at first, 1/num_updates at last."""
    return jnp.maximum(1.0 - update / config.num_updates, 0.0) if config.anneal else jnp.float32(1.0)


def make_optimizer(config):
    """Gradient clipping, then Adam. Adam counts minibatches; the learning rate changes between updates only."""
    steps_per_update = config.update_epochs * config.num_minibatches

    def learning_rate(step):
        return config.learning_rate * anneal_fraction(config, step // steps_per_update)

    # Not flattened as in the other scripts: most parameters are in one array, and to copy them takes longer.
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(learning_rate, eps=1e-5))


def init_state(network, optimizer, obs, seed):
    """The TrainState at the start of a run; obs: [N, ...], any observations."""
    params_key, key = jax.random.split(jax.random.key(seed))
    params = network.init(params_key, obs)
    return TrainState(params, optimizer.init(params), key, jnp.int32(0))


def update(config, apply_fn, optimizer, state, rollout, next_obs):
    """One PPO update: advantages, then update_epochs passes over the shuffled rows in num_minibatches parts.

    Args:
      state: TrainState. rollout: Rollout [T, N]. next_obs: [N, ...], after the rollout's last step.

    Returns:
      (TrainState, metrics), metrics being scalars: those of ppo_loss, averaged over all minibatches, and
      learning_rate, clip_coef, explained_variance.
    """
    _, next_value = apply_fn(state.params, next_obs)
    reward = config.reward_scale * rollout.reward
    advantages, targets = compute_gae(
        reward, rollout.value, next_value, rollout.terminated, rollout.done, config.gamma, config.gae_lambda
    )
    batch = Batch(rollout.obs, rollout.action, rollout.log_prob, advantages, targets, rollout.valid)
    fraction = anneal_fraction(config, state.update)
    key, shuffle_key = jax.random.split(state.key)
    # Each environment's steps are shuffled by themselves, so that every minibatch has as many from each, and no
    # observation has to go to another device.
    order = jnp.tile(jnp.arange(config.num_steps), (config.update_epochs, config.num_envs, 1))
    order = jax.random.permutation(shuffle_key, order, axis=2, independent=True)
    order = order.reshape(config.update_epochs, config.num_envs, config.num_minibatches, -1).swapaxes(1, 2)

    def minibatch_step(carry, rows):
        params, opt_state = carry
        minibatch = jax.tree.map(partial(take_steps, rows), batch)
        grads, metrics = ppo_gradient(
            params, apply_fn, minibatch, config.clip_coef * fraction, config.vf_coef, config.ent_coef
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    rows = order.reshape(config.update_epochs * config.num_minibatches, config.num_envs, -1)
    (params, opt_state), metrics = jax.lax.scan(minibatch_step, (state.params, state.opt_state), rows)
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["learning_rate"] = config.learning_rate * fraction
    metrics["clip_coef"] = config.clip_coef * fraction
    metrics["explained_variance"] = explained_variance(rollout.value, targets, rollout.valid)
    metrics["finite"] = jnp.isfinite(metrics["policy_loss"] + metrics["value_loss"] + optax.tree.norm(params))
    return TrainState(params, opt_state, key, state.update + 1), metrics


def take_steps(rows, x):
    """The given steps of every environment. rows: [N, m]; x: [T, N, ...]. Returns [N * m, ...]."""
    return jax.vmap(lambda rows, x: x[rows], in_axes=(0, 1))(rows, x).reshape(-1, *x.shape[2:])


def explained_variance(values, returns, valid):
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 a constant guess; NaN if all returns are equal."""
    return_var, error_var = jnp.var(returns, where=valid), jnp.var(returns - values, where=valid)
    varies = return_var > 1e-12 * jnp.mean(returns**2, where=valid)  # by more than rounding
    return jnp.where(varies, 1.0 - error_var / return_var, jnp.nan)


# ----------------------------------------------------------------------------------------- rollout


def act(apply_fn, params, buffer, key, obs, t):
    """Choose actions for obs [N, ...] and keep what the update needs in row t of `buffer`, on the device.

    buffer: (obs, action, log_prob, value), each [T, N, ...]. Returns (buffer, next key, action [N]).
    """
    key, action_key = jax.random.split(key)
    logits, value = apply_fn(params, obs)
    action = jax.random.categorical(action_key, logits)
    log_prob = jnp.take_along_axis(action_log_probs(logits), action[:, None], axis=-1)[:, 0]
    buffer = tuple(array.at[t].set(row) for array, row in zip(buffer, (obs, action, log_prob, value)))
    return buffer, key, action


def make_buffer(config, obs):
    """Zeros in the shape that `act` fills: (obs, action, log_prob, value)."""
    shape = (config.num_steps, config.num_envs)
    dtypes = (obs.dtype, np.int32, np.float32, np.float32)
    shapes = (shape + obs.shape[1:], shape, shape, shape)
    return tuple(jax.device_put(np.zeros(s, d)) for s, d in zip(shapes, dtypes))


def rollout(config, act_fn, envs, state, buffer, obs):
    """Play num_steps steps in every environment of this process with the policy of `state`.

    Args:
      act_fn: `act`, compiled; one call and one read by the host for each step.
      obs: [n, ...], where the last rollout left off.

    Returns:
      (state, buffer, Rollout, obs, episodes): episodes lists those that ended, see finished_episodes.
    """
    shape, key, episodes = (config.num_steps, envs.num_envs), state.key, []
    # New arrays each time: JAX may still read the ones handed to the last update.
    reward, (terminated, done, valid) = np.zeros(shape, np.float32), np.zeros((3, *shape), bool)
    for t in range(config.num_steps):
        buffer, key, action = act_fn(state.params, buffer, key, obs, np.int32(t))
        obs, reward[t], terminated[t], truncated, info = envs.step(action)
        valid[t], done[t] = info["decided"], terminated[t] | truncated
        episodes += finished_episodes(info)
    return state._replace(key=key), buffer, Rollout(*buffer, reward, terminated, done, valid), obs, episodes


# -------------------------------------------------------------------------------------- evaluation


class Evaluation(NamedTuple):
    """One entry per episode."""

    returns: np.ndarray  # float64 [episodes], undiscounted sums of the game's own rewards
    lengths: np.ndarray  # int [episodes], in frames
    capped: np.ndarray  # bool [episodes], cut by eval_max_steps or the emulator: the game would have gone on
    greedy: bool  # the most likely actions, else sampled ones

    def __str__(self):
        capped = f", {self.capped.sum()} capped" if self.capped.any() else ""
        mean, std, kind = self.returns.mean(), self.returns.std(), "greedy" if self.greedy else "sampled"
        return f"{kind} return over {len(self.returns)} episodes: {mean:.1f} +- {std:.1f}{capped}"

    def summary(self):
        """The eval_* keys of result.json and evaluation.json."""
        return {
            "eval_return_mean": float(self.returns.mean()),
            "eval_return_std": float(self.returns.std()),
            "eval_episodes": len(self.returns),
            "eval_capped": int(self.capped.sum()),
            "eval_greedy": self.greedy,
        }


def evaluate(config, params, episodes, seed):
    """Play `episodes` whole games, with the most likely actions if config.eval_greedy. Returns an Evaluation.

    Each game has an environment of its own. Counting the first games to finish in fewer environments would
    favour the short ones, which are the bad ones.
    """
    envs = make_envs(config, episodes)
    apply_fn = make_network(envs).apply

    @jax.jit
    def choose(params, obs, key, t):
        logits, _ = apply_fn(params, obs)
        return logits.argmax(-1) if config.eval_greedy else jax.random.categorical(jax.random.fold_in(key, t), logits)

    seed = env_seed(seed, EVALUATION)
    (obs, _), key = envs.reset(seed=seed), jax.random.key(seed)
    returns, lengths, playing = np.zeros(episodes), np.zeros(episodes, int), np.ones(episodes, bool)
    capped = np.zeros(episodes, bool)
    while playing.any() and lengths.max() < config.eval_max_steps:
        obs, _, _, _, info = envs.step(np.asarray(choose(params, obs, key, lengths.max())))
        returns += np.where(playing, info["reward"], 0.0)
        lengths += playing
        capped |= playing & info["cut"]
        playing &= ~info["game_over"]
    envs.close()
    return Evaluation(returns, lengths, capped=capped | playing, greedy=config.eval_greedy)


def record_gif(config, params, path, seed, max_steps=500):
    """Draw the greedy agent's first steps, every other one; where that fails, say so and go on."""
    try:
        # Two games of one seed and the same actions are the same: one as the agent sees it, one in colour.
        envs = make_envs(config, 1)
        colour = make_envs(config, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)
        apply_fn = jax.jit(make_network(envs).apply)
        (obs, _), (picture, _) = (e.reset(seed=env_seed(seed, EVALUATION)) for e in (envs, colour))
        images = []
        for step in range(max_steps):
            if step % 2 == 0:
                images.append(Image.fromarray(picture[0, ..., 0]))
            action = np.asarray(apply_fn(params, obs)[0].argmax(-1))
            (obs, _, _, _, info), (picture, *_) = envs.step(action), colour.step(action)
            if info["game_over"][0]:
                break
        images[0].save(path, save_all=True, append_images=images[1:], duration=130, loop=0)
    except Exception as error:  # a picture is not worth a finished run
        print(f"no {path.name}: {error}", file=sys.stderr)


# ------------------------------------------------------------------------- checkpoints and records


def write_atomically(path, data):
    """Write bytes so that `path` holds the old content or the new one, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path, content):
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def save_checkpoint(run_dir, state, seconds):
    """Write state and run time so far into run_dir/checkpoints; keep this checkpoint and the one before."""
    state = state._replace(key=jax.random.key_data(state.key))
    data = serialization.to_bytes({"state": state, "seconds": seconds})
    path = run_dir / "checkpoints" / f"{int(state.update):08d}.msgpack"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, hashlib.sha256(data).digest() + data)
    for old in sorted(path.parent.glob("*.msgpack"))[:-2]:
        old.unlink()


def load_checkpoint(run_dir, like):
    """The newest undamaged checkpoint of a run: (state, seconds). like: a TrainState with the right shapes.

    Raises UsageError if there is none, or if it belongs to another network or optimizer.
    """
    damaged = []
    for path in sorted(run_dir.glob("checkpoints/*.msgpack"), reverse=True):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            damaged.append(path.name)
            continue
        try:
            saved = serialization.from_bytes({"state": like, "seconds": 0.0}, content[32:])
            state = saved["state"]._replace(key=jax.random.wrap_key_data(saved["state"].key))
        except (ValueError, AttributeError, KeyError, TypeError) as error:  # Flax's, whatever differs
            raise UsageError(
                f"--resume or --evaluate {path}: another network's or optimizer's: {' '.join(str(error).split())}"
            ) from None
        if jax.tree.map(jnp.shape, state) != jax.tree.map(jnp.shape, like):
            raise UsageError(f"--resume or --evaluate {path}: another network's shapes")
        if damaged:
            print(f"damaged: {', '.join(damaged)}; loaded {path}", file=sys.stderr)
        return jax.device_put(state), saved["seconds"]
    raise UsageError(f"--resume or --evaluate {run_dir}: no undamaged checkpoint there")


def load_config(run_dir):
    """The Config that a run was started with. Raises UsageError if there is no such run."""
    path = Path(run_dir) / "config.json"
    try:
        config = Config(**json.loads(path.read_text()))
        check_config(config)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--resume or --evaluate {run_dir}: no run there: {error}") from None
    return config


class Recorder:
    """What a run tells: metrics.csv and a TensorBoard event file, one row per update, and the progress bar."""

    def __init__(self, run_dir, config, frames):
        """frames: how far the run is; rows beyond it, written after the checkpoint now resumed from, are dropped."""
        path = run_dir / "metrics.csv"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else [",".join(COLUMNS) + "\n"]
        kept = lines[:1] + [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= frames]
        write_atomically(path, "".join(kept).encode())
        self.file = open(path, "a", newline="")
        self.csv = csv.DictWriter(self.file, COLUMNS, lineterminator="\n")
        self.events = EventFileWriter(str(run_dir))
        # TensorBoard drops what an earlier process wrote at this step or later.
        start = SessionLog(status=SessionLog.START)
        self.events.add_event(Event(wall_time=time.time(), step=frames + 1, session_log=start))
        total = config.num_updates * config.batch_size
        self.bar = tqdm(total=total, initial=frames, unit="frame", unit_scale=True, disable=not sys.stderr.isatty())
        self.next_line, self.recent_return = time.monotonic(), "-"

    def record(self, frames, seconds, metrics):
        """Add one row. metrics: floats by the names in COLUMNS; a missing or NaN one leaves its cell empty."""
        metrics = {name: float(x) for name, x in metrics.items() if not math.isnan(x)}
        cells = {name: f"{x:.6g}" for name, x in metrics.items()}
        self.csv.writerow({"frames": frames, "seconds": f"{seconds:.3f}", **cells})
        self.file.flush()
        summary = Summary(value=[Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()])
        self.events.add_event(Event(wall_time=time.time(), step=frames, summary=summary))
        self.events.flush()
        self.recent_return = cells.get("charts/episodic_return", self.recent_return)
        text = f"return {self.recent_return}, {metrics['charts/SPS']:,.0f} frames/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(frames - self.bar.n)
        if self.bar.disable and time.monotonic() >= self.next_line:
            print(f"{frames:,} of {self.bar.total:,} frames, {text}", flush=True)
            self.next_line = time.monotonic() + 10.0

    def close(self):
        self.bar.close()
        self.events.close()
        self.file.close()


# ------------------------------------------------------------------------------------------- train


def create_run_dir(config):
    """Make the run's directory, with config.json in it unless it is for an evaluation. Returns its Path."""
    env_name, now = config.env_id.replace("/", "-"), time.strftime("%Y%m%d-%H%M%S")
    name = f"{Path(__file__).stem}__{env_name}__seed{config.seed}__{now}"
    run_dir = Path(config.run_dir or Path("runs") / name)
    try:
        if any((run_dir / file).exists() for file in ("config.json", "evaluation.json")):
            raise UsageError(f"--run-dir {run_dir} already holds a run; --resume {run_dir} goes on with it")
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.evaluate:
            write_json(run_dir / "config.json", asdict(config))
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir} cannot be made: {error}") from None
    return run_dir


@contextmanager
def interrupts_noted():
    """Yields a list that the first Ctrl-C or SIGTERM only adds to, so no update is cut in two; a second one acts."""
    noted, handlers = [], {}

    def note(number, frame):
        noted.append(number)
        signal.signal(number, handlers[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def join_processes(config):
    """Make this process part of a distributed run. Raises UsageError where nothing says which one it is."""
    check_config(config)
    check_env(config)  # before the first word to the others: then all stop for the same reason
    names = ("coordinator_address", "num_processes", "process_id")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    # SIGTERM is ours, not JAX's, which would take it while nobody looks: see interrupts_noted.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given)
    except (ValueError, IndexError, RuntimeError) as error:
        raise UsageError(f"--distributed: {' '.join(str(error).split())}") from None


def check_devices(config):
    """Raise UsageError unless the environments can be spread evenly over all devices of all processes."""
    if jax.local_device_count() * jax.process_count() != jax.device_count():
        raise UsageError(f"--distributed: {jax.local_device_count()} devices here, another number in other processes")
    if config.num_envs % jax.device_count():
        devices = f"{jax.device_count()} devices ({jax.process_count()} processes)"
        raise UsageError(f"--num-envs {config.num_envs} cannot be spread evenly over {devices}")


def shardings():
    """Where arrays lie: (the same on every device, split by environment [N, ...], the same for [T, N, ...])."""
    mesh = Mesh(np.array(jax.devices()), ("env",))
    return tuple(NamedSharding(mesh, P(*axes)) for axes in ((), ("env",), (None, "env")))


def to_devices(tree, sharding):
    """One array over all processes from each one's part of it, for every array of `tree`."""
    if jax.process_count() == 1:
        return tree  # the compiled functions do the same, faster
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jax.make_array_from_process_local_data(sharding, x), tree
    )


def to_process(array):
    """This process's part of an array that is split by environment, as a NumPy array."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])


def to_one_device(tree):
    """Arrays that are the same on every device, from this process's first device."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def compile_functions(config, envs):
    """Compile init_state, update and act for this run's shapes, before the clock of charts/SPS starts.

    Returns init_fn(obs, seed), act_fn(params, buffer, key, obs, t) and update_fn(state, rollout, next_obs), which
    take NumPy arrays of this process's environments. Every device holds the whole state and a part of the
    environments. shard_map runs the network on each part and sums the gradients of the parts; all other sums
    in `update`, like the mean of the advantages, are over all environments because its arrays are.
    """
    network, optimizer = make_network(envs), make_optimizer(config)
    same, by_env, by_step = shardings()
    apply_fn = network.apply
    if jax.device_count() > 1:  # the sum of one part's gradients alone is a copy, 1% of the time
        specs = dict(in_specs=(P(), P("env")), out_specs=P("env"))
        apply_fn = jax.shard_map(network.apply, mesh=same.mesh, **specs, check_vma=False)
    # init runs once: optimizing it would take longer than running it.
    quick = {"xla_backend_optimization_level": 0}
    init_fn = jax.jit(partial(init_state, network, optimizer), out_shardings=same, compiler_options=quick)
    act_fn = jax.jit(partial(act, apply_fn), donate_argnums=1, out_shardings=(by_step, same, by_env))
    update_fn = jax.jit(partial(update, config, apply_fn, optimizer), donate_argnums=0, out_shardings=same)

    def struct(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    space, shape = envs.single_observation_space, (config.num_steps, config.num_envs)
    obs, t = struct((config.num_envs, *space.shape), space.dtype, by_env), struct((), np.int32, same)
    one, seed = struct((1, *space.shape), space.dtype, same), struct((), np.uint32, same)
    state = jax.tree.map(lambda x: struct(x.shape, x.dtype, same), jax.eval_shape(init_fn, one, seed))
    buffer = jax.eval_shape(partial(make_buffer, config, obs))
    buffer = tuple(struct(x.shape, x.dtype, by_step) for x in buffer)
    reward, flags = struct(shape, np.float32, by_step), struct(shape, bool, by_step)
    data = Rollout(*buffer, reward, flags, flags, flags)
    init_fn = init_fn.lower(one, seed).compile()
    act_fn = act_fn.lower(state.params, buffer, state.key, obs, t).compile()
    update_fn = update_fn.lower(state, data, obs).compile()

    def act_here(params, buffer, key, obs, t):
        buffer, key, action = act_fn(params, buffer, key, to_devices(obs, by_env), to_devices(t, same))
        return buffer, key, to_process(action)

    def update_here(state, rollout, next_obs):
        return update_fn(state, to_devices(rollout, by_step), to_devices(next_obs, by_env))

    return init_fn, act_here, update_here


def named_metrics(metrics, episodes):
    """The row of metrics.csv, floats by the names in COLUMNS, from what `update` and `rollout` returned."""
    charts = ("learning_rate", "clip_coef")
    row = {("charts/" if name in charts else "losses/") + name: float(x) for name, x in metrics.items()}
    return row | (dict(zip(EPISODE_COLUMNS, np.mean(episodes, axis=0).tolist())) if episodes else {})


def everywhere(episodes, interrupts):
    """What all processes have seen: (episodes, as one of mean return and length if there are any, interrupted)."""
    sums = np.array([len(episodes), len(interrupts), *np.sum(episodes or [(0.0, 0.0)], axis=0)], np.float32)
    count, interrupted, *totals = multihost_utils.process_allgather(sums).reshape(-1, len(sums)).sum(axis=0)
    return [tuple(total / count for total in totals)] if count else [], interrupted > 0


def learn(config, run_dir):
    """Train to the end, from the newest checkpoint in run_dir if config.resume. Returns (state, seconds, sps).

    Raises KeyboardInterrupt after Ctrl-C or SIGTERM, with a checkpoint saved, and FloatingPointError where a
    loss or a parameter is not finite, with the last good checkpoint left alone.
    """
    began = time.monotonic()
    envs = make_envs(config, config.num_envs // jax.device_count() * jax.local_device_count())  # this process's part
    init_fn, act_fn, update_fn = compile_functions(config, envs)
    same, by_env, by_step = shardings()
    local = replace(config, num_envs=envs.num_envs)
    buffer = to_devices(jax.tree.map(np.asarray, make_buffer(local, envs.observation_space)), by_step)
    one = np.zeros((1, *envs.single_observation_space.shape), np.uint8)
    state, seconds = init_fn(to_devices(one, same), to_devices(np.uint32(config.seed), same)), 0.0
    if config.resume and any(run_dir.glob("checkpoints/*.msgpack")):  # else it died before the first one
        state, seconds = load_checkpoint(run_dir, to_one_device(state))
        state = jax.jit(lambda x: x, out_shardings=same)(state)
    first = int(state.update)
    obs, _ = envs.reset(seed=env_seed(config.seed, first) + jax.process_index() * envs.num_envs)
    sps = first * config.batch_size / max(seconds, 1e-9)  # stands if nothing but the evaluation is left to do
    began, compiled = began - seconds, time.monotonic()
    leader = jax.process_index() == 0  # the only one that writes
    recorder = Recorder(run_dir, config, frames=first * config.batch_size) if leader else None
    with interrupts_noted() as interrupts, closing(envs), closing(recorder) if leader else nullcontext():
        for number in range(first + 1, config.num_updates + 1):
            state, buffer, data, obs, episodes = rollout(config, act_fn, envs, state, buffer, obs)
            state, metrics = update_fn(state, data, obs)
            metrics = jax.device_get(metrics)  # waits for the update, so the times below are of finished work
            finite, frames, now = metrics.pop("finite"), number * config.batch_size, time.monotonic()
            seconds, sps = now - began, (number - first) * config.batch_size / max(now - compiled, 1e-9)
            episodes, interrupted = everywhere(episodes, interrupts)
            if leader:
                recorder.record(frames, seconds, named_metrics(metrics, episodes) | {"charts/SPS": sps})
            if not finite:
                raise FloatingPointError(f"loss or parameters not finite after {frames:,} frames, so not saved")
            last = number == config.num_updates
            if leader and (number % config.checkpoint_every == 0 or last or interrupted):
                save_checkpoint(run_dir, to_one_device(state), seconds)
            if interrupted:
                raise KeyboardInterrupt(f"stopped after {frames:,} frames; go on with --resume {run_dir}")
    return state, seconds, sps


def train(config):
    """Train, evaluate and draw the agent, or go on with the run in config.resume. Returns what result.json holds.

    Of a distributed run every process calls this; process 0 alone writes and speaks.
    Raises UsageError, before anything is written, if config cannot be run; and see `learn`.
    """
    if config.resume:
        config = replace(load_config(config.resume), resume=config.resume)
    check_config(config)
    check_env(config)
    check_devices(config)
    leader, frames = jax.process_index() == 0, config.num_updates * config.batch_size
    say = partial(print, flush=True) if leader else lambda text: None
    run_dir = Path(config.resume) if config.resume else create_run_dir(config) if leader else None
    if config.resume and (run_dir / "result.json").exists():
        say(f"{run_dir} is finished, after {frames:,} frames: see {run_dir / 'result.json'}")
        return json.loads((run_dir / "result.json").read_text())
    devices = f"{jax.device_count()} device{'s' * (jax.device_count() > 1)} ({jax.devices()[0].platform})"
    say(f"{config.env_id}: {frames:,} frames in {config.num_updates:,} updates on {devices}, into {run_dir}")

    state, seconds, sps = learn(config, run_dir)
    params = to_one_device(state.params)
    # Every process plays the same games: a wait for process 0 alone could only be so long.
    evaluation = evaluate(config, params, config.eval_episodes, config.seed)
    result = {"env_id": config.env_id, "seed": config.seed, "frames": frames}
    result |= {"seconds": round(seconds, 3), "sps": round(sps, 1)} | evaluation.summary()
    result["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    result["device"], result["devices"] = jax.devices()[0].device_kind, jax.device_count()
    if leader:
        record_gif(config, params, run_dir / "agent.gif", config.seed)
        write_json(run_dir / "result.json", result)
    say(f"{frames:,} frames in {seconds:.1f} s ({sps:,.0f} frames/s after compiling); {evaluation}")
    return result


def evaluate_run(config):
    """Evaluate the agent of the run in config.evaluate, into a directory of its own. Returns the eval_* keys."""
    check_config(config)
    check_env(config)
    envs = make_envs(config, 1)
    obs = jax.ShapeDtypeStruct(envs.observation_space.shape, envs.observation_space.dtype)
    like = jax.eval_shape(partial(init_state, make_network(envs), make_optimizer(config)), obs, 0)
    state, _ = load_checkpoint(Path(config.evaluate), like)
    run_dir = create_run_dir(config)
    evaluation = evaluate(config, state.params, config.eval_episodes, config.seed)
    record_gif(config, state.params, run_dir / "agent.gif", config.seed)
    write_json(run_dir / "evaluation.json", evaluation.summary())
    print(f"{evaluation}; written to {run_dir}")
    return evaluation.summary()


def parse_args(args=None):
    """The Config of a command line; with --resume or --evaluate, the settings of the run that it names."""
    config = tyro.cli(Config, args=args, description=__doc__)
    source = config.resume or config.evaluate
    if not source:
        return config
    if config.resume and config.evaluate:
        raise UsageError("--resume and --evaluate exclude each other")
    if config.evaluate and config.distributed:
        raise UsageError("--evaluate runs in one process, without --distributed")
    launch = dict(distributed=False, coordinator_address=None, num_processes=None, process_id=None)
    saved = replace(load_config(source), run_dir=None, **launch)
    config = tyro.cli(Config, args=args, description=__doc__, default=saved)
    played = ("evaluate", "run_dir", "seed", "eval_episodes", "eval_max_steps", "eval_greedy")
    free = played if config.evaluate else ("resume", *launch)
    for field in fields(config):
        if field.name not in free and getattr(config, field.name) != getattr(saved, field.name):
            raise UsageError(f"{flag(field.name)} cannot be changed: {source} has its own settings")
    check_env(config)  # of the launch flags, which `train` does not see
    return config


def main(args=None):
    """Run a command line; returns the exit code: 0 well, 1 diverged, 2 bad input, 130 interrupted."""
    try:
        config = parse_args(args)
        if config.distributed:
            join_processes(config)
        evaluate_run(config) if config.evaluate else train(config)
        return 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if not jax.distributed.is_initialized() or jax.process_index() == 0:
            print(error if error.args else "interrupted", file=sys.stderr)
        return 130
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    if jax.distributed.is_initialized():
        # The others wait for this process, and its way out would wait for them, five minutes long.
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
