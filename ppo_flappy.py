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
"""Proximal Policy Optimization (PPO) for Flappy Bird from pixels, in one file: JAX, Flax and Optax.

    python ppo_flappy.py --total-frames 10000000        # train, evaluate, draw agent.gif
    python ppo_flappy.py --resume runs/NAME             # go on after a kill or Ctrl-C
    python ppo_flappy.py --evaluate benchmark/agents/flappy      # play the agent that comes with this project
    tensorboard --logdir runs                           # look at the curves

One frame is one decision of the agent in one environment; the game moves on by --frame-skip of its frames.

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
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

# pygame must neither look for a display nor a sound device, nor greet; it reads this when it is imported.
os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pygame
import tyro
from flappy_bird_gymnasium import FlappyBirdEnv
from flax import serialization
from flax.linen.initializers import orthogonal
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

EPISODE_COLUMNS = (
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/episodic_score",
)  # what finished_episodes gives
CHART_COLUMNS = ("charts/SPS", "charts/learning_rate", "charts/clip_coef")
LOSS_COLUMNS = tuple(
    "losses/" + name
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
)
COLUMNS = ("frames", "seconds", *EPISODE_COLUMNS, *CHART_COLUMNS, *LOSS_COLUMNS)  # of metrics.csv
PART_ROWS = 64  # rows of a minibatch that a CPU takes at once; in trials on two cores faster than 32, 128 or 256
PACKAGES = ("jax", "flax", "optax", "gymnasium", "flappy-bird-gymnasium")  # whose versions result.json names


@dataclass(frozen=True)
class Config:
    """Train a PPO agent, then evaluate it. Everything goes to a new directory under runs/."""

    env_id: str = "FlappyBird-v0"  # the only one that this script plays
    seed: int = 1  # of parameters, actions, minibatches and environments: 0 to 2**32 - 1
    total_frames: int = 10_000_000  # decisions of the agent, all environments together; rounded down to whole updates
    num_envs: int = 16  # environments that play side by side
    num_steps: int = 128  # steps of each environment from one update to the next
    num_minibatches: int = 8  # parts into which the num_envs * num_steps rows of an update are shuffled
    update_epochs: int = 4  # passes over these rows
    learning_rate: float = 1e-3  # step size of Adam
    anneal: bool = True  # take learning rate and clip range linearly to zero over the run
    reward_scale: float = 0.1  # factor on the rewards that the learner sees; reported returns are without it
    gamma: float = 0.98  # discount: what a reward is worth one step before it comes
    gae_lambda: float = 0.95  # 0: advantages from one step and the value function; 1: from the whole return
    clip_coef: float = 0.2  # how far a probability ratio may move from 1 before it stops to pay
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.003  # weight of the entropy bonus, which keeps the policy exploring
    max_grad_norm: float = 0.5  # longer gradients are scaled down to this norm
    frame_skip: int = 2  # frames of the game (30 a second) from one decision to the next
    max_episode_steps: int = 20_000  # an episode is truncated after this many decisions
    checkpoint_every: int = 20  # updates from one checkpoint to the next
    eval_episodes: int = 20  # episodes of the greedy evaluation at the end
    eval_max_steps: int = 2_000  # an evaluation episode is cut here and reported as capped
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
    """Raise UsageError unless this script plays `config.env_id`, and as long as the evaluation asks for."""
    if config.env_id != "FlappyBird-v0":
        raise UsageError(f"--env-id {config.env_id}: did you mean FlappyBird-v0? This script plays nothing else")
    if config.eval_max_steps > config.max_episode_steps:
        raise UsageError(f"--eval-max-steps is above --max-episode-steps {config.max_episode_steps}")


SKY = pygame.Rect(0, 0, 288, 404)  # the picture without the ground, which begins at row 404 and only scrolls


class FlappyPixels(gym.Env):
    """Flappy Bird seen as uint8 [84, 84, 4]: the pictures of the last four decisions, the newest last.

    An episode begins with four times its first picture. Actions: 0 does nothing, 1 flaps, on the first of
    the frame_skip frames only. The reward is the game's, summed over these frames: 0.1 for each frame
    alive, 1 for a pipe, -0.5 for touching the top, -1 for dying. info["score"] counts the pipes passed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    render_mode = "rgb_array"
    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, frame_skip):
        self.frame_skip = frame_skip
        # The lidar costs a hundred times what the rest of the game does, and it changes the reward.
        self.game = FlappyBirdEnv(render_mode="rgb_array", use_lidar=False, background=None)
        self.small = pygame.Surface((84, 84))
        self.pictures = deque(maxlen=4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        _, info = self.game.reset(seed=seed)
        self.pictures.extend([self.draw()] * 4)
        return np.stack(self.pictures, axis=-1), info

    def step(self, action):
        total = 0.0
        for frame in range(self.frame_skip):
            _, reward, terminated, _, info = self.game.step(int(action) if frame == 0 else 0)
            total += reward
            if terminated:
                break
        self.pictures.append(self.draw())
        return np.stack(self.pictures, axis=-1), total, terminated, False, info

    def draw(self):
        """One picture, uint8 [84, 84]: what is above the ground, averaged down, green channel."""
        screen = self.game._surface
        screen.set_clip(SKY)
        self.game._draw_surface(show_score=False, show_rays=False)
        pygame.transform.smoothscale(screen.subsurface(SKY), (84, 84), self.small)
        return np.array(pygame.surfarray.pixels_green(self.small).T)  # a copy; pygame has [column, row]

    def render(self):
        self.game._surface.set_clip(None)
        return self.game.render()


class ThreadedVectorEnv(gym.vector.VectorEnv):
    """Environments that step side by side in threads: pygame lets go of Python's lock while it scales a picture.

    Gymnasium's SyncVectorEnv gives the same numbers with one core; its AsyncVectorEnv, with a process for each
    environment, was slower than that on two cores.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, envs):
        self.envs, self.num_envs, self.pool = envs, len(envs), ThreadPoolExecutor()
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed=None, options=None):
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        obs, infos = zip(*(env.reset(seed=s) for env, s in zip(self.envs, seeds)))
        self.ended = np.zeros(self.num_envs, bool)
        return np.stack(obs), {"score": np.array([info["score"] for info in infos])}

    def step(self, actions):
        def step_one(env, action, ended):
            if ended:
                obs, info = env.reset()
                return obs, 0.0, False, False, info
            return env.step(action)

        results = self.pool.map(step_one, self.envs, actions.tolist(), self.ended)
        obs, reward, terminated, truncated, infos = zip(*results)
        terminated, truncated = np.array(terminated), np.array(truncated)
        self.ended = terminated | truncated
        info = {"score": np.array([info["score"] for info in infos])}
        return np.stack(obs), np.array(reward), terminated, truncated, info

    def close_extras(self, **kwargs):
        self.pool.shutdown()


def make_envs(config, num_envs):
    """`num_envs` games, stepped together.

    Autoreset mode NEXT_STEP: the step after an episode's last ignores its action and returns the first
    observation of the next episode, so the last observation of every episode is seen like any other.
    """

    def make_env():
        return gym.wrappers.TimeLimit(FlappyPixels(config.frame_skip), config.max_episode_steps)

    envs = ThreadedVectorEnv([make_env() for _ in range(num_envs)])
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def finished_episodes(info):
    """(return, length, score) of each episode that the step behind `info` ended."""
    if "episode" not in info:
        return []
    ended, stats = info["_episode"], info["episode"]
    return list(zip(stats["r"][ended].tolist(), stats["l"][ended].tolist(), info["score"][ended].tolist()))


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

    The network of Mnih et al. 2015 (Nature 518, 529-533) at half its width, with a first kernel of 4x4 in place
    of 8x8: its patches do not overlap, which saves most of the time on a CPU.
    """

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = obs.astype(jnp.float32) / 255.0
        for features, kernel_size, stride in ((16, 4, 4), (32, 4, 2), (32, 3, 1)):
            x = nn.relu(Conv(features, kernel_size, stride)(x))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(256, kernel_init=orthogonal(math.sqrt(2)))(x))
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

    # flatten: all parameters as one vector, which leaves a good deal less to compile.
    return optax.flatten(
        optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(learning_rate, eps=1e-5))
    )


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
    batch = jax.tree.map(lambda x: x.reshape(config.batch_size, *x.shape[2:]), batch)
    fraction = anneal_fraction(config, state.update)
    key, shuffle_key = jax.random.split(state.key)
    order = jnp.tile(jnp.arange(config.batch_size), (config.update_epochs, 1))
    order = jax.random.permutation(shuffle_key, order, axis=1, independent=True)  # each epoch shuffled by itself

    def minibatch_step(carry, rows):
        params, opt_state = carry
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        grads, metrics = ppo_gradient(
            params, apply_fn, minibatch, config.clip_coef * fraction, config.vf_coef, config.ent_coef
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    rows = order.reshape(config.update_epochs * config.num_minibatches, -1)
    (params, opt_state), metrics = jax.lax.scan(minibatch_step, (state.params, state.opt_state), rows)
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["learning_rate"] = config.learning_rate * fraction
    metrics["clip_coef"] = config.clip_coef * fraction
    metrics["explained_variance"] = explained_variance(rollout.value, targets, rollout.valid)
    metrics["finite"] = jnp.isfinite(metrics["policy_loss"] + metrics["value_loss"] + optax.tree.norm(params))
    return TrainState(params, opt_state, key, state.update + 1), metrics


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


def rollout(config, act_fn, envs, state, buffer, obs, ended):
    """Play num_steps steps in every environment with the policy of `state`.

    Args:
      act_fn: `act`, compiled; one call and one read by the host for each step.
      obs, ended: [N, ...] and bool [N], where the last rollout left off; ended: that step ended an episode.

    Returns:
      (state, buffer, Rollout, obs, ended, episodes): episodes lists those that ended, see finished_episodes.
    """
    shape, key, episodes = (config.num_steps, config.num_envs), state.key, []
    # New arrays each time: JAX may still read the ones handed to the last update.
    reward, (terminated, done, valid) = np.zeros(shape, np.float32), np.zeros((3, *shape), bool)
    for t in range(config.num_steps):
        buffer, key, action = act_fn(state.params, buffer, key, obs, np.int32(t))
        obs, reward[t], terminated[t], truncated, info = envs.step(np.asarray(action))
        valid[t] = ~ended
        ended = done[t] = terminated[t] | truncated
        episodes += finished_episodes(info)
    return state._replace(key=key), buffer, Rollout(*buffer, reward, terminated, done, valid), obs, ended, episodes


# -------------------------------------------------------------------------------------- evaluation


class Evaluation(NamedTuple):
    """One entry per episode."""

    returns: np.ndarray  # float64 [episodes], undiscounted sums of rewards
    lengths: np.ndarray  # int [episodes], in frames
    scores: np.ndarray  # int [episodes], pipes passed
    capped: np.ndarray  # bool [episodes], cut by eval_max_steps: the return would have been higher

    def __str__(self):
        capped = f", {self.capped.sum()} capped" if self.capped.any() else ""
        mean, std = self.returns.mean(), self.returns.std()
        score = f"score {self.scores.mean():.1f}, median {np.median(self.scores):.0f}"
        return f"greedy return over {len(self.returns)} episodes: {mean:.1f} +- {std:.1f}, {score}{capped}"

    def summary(self):
        """The eval_* keys of result.json and evaluation.json."""
        return {
            "eval_return_mean": float(self.returns.mean()),
            "eval_return_std": float(self.returns.std()),
            "eval_score_mean": float(self.scores.mean()),
            "eval_score_median": float(np.median(self.scores)),
            "eval_episodes": len(self.returns),
            "eval_capped": int(self.capped.sum()),
        }


def evaluate(config, params, episodes, seed):
    """Play `episodes` whole episodes, always with the most likely action. Returns an Evaluation.

    Each episode has an environment of its own. Counting the first episodes to finish in fewer environments
    would favour the short ones, which are the bad ones.
    """
    envs = make_envs(config, episodes)
    apply_fn = make_network(envs).apply
    greedy = jax.jit(lambda params, obs: apply_fn(params, obs)[0].argmax(-1))
    obs, _ = envs.reset(seed=env_seed(seed, EVALUATION))
    returns, playing = np.zeros(episodes), np.ones(episodes, bool)
    lengths, scores = np.zeros((2, episodes), int)
    capped = np.zeros(episodes, bool)
    while playing.any() and lengths.max() < config.eval_max_steps:
        obs, reward, terminated, truncated, info = envs.step(np.asarray(greedy(params, obs)))
        returns += np.where(playing, reward, 0.0)
        scores = np.where(playing, info["score"], scores)
        lengths += playing
        capped |= playing & truncated  # at max_episode_steps: the game has no limit of its own
        playing &= ~(terminated | truncated)
    envs.close()
    return Evaluation(returns, lengths, scores, capped=capped | playing)


def record_gif(config, params, path, seed, max_steps=250):
    """Draw the greedy agent's first steps into a GIF; where that fails, say so and go on."""
    try:
        env = FlappyPixels(config.frame_skip)
        apply_fn = jax.jit(ActorCritic(env.action_space.n).apply)
        obs, _ = env.reset(seed=env_seed(seed, EVALUATION))
        images = []
        for _ in range(max_steps):
            images.append(Image.fromarray(env.render()).reduce(2))
            logits, _ = apply_fn(params, obs[None])
            obs, _, terminated, truncated, _ = env.step(int(logits.argmax()))
            if terminated or truncated:
                break
        duration = 1000 * config.frame_skip // env.metadata["render_fps"]
        images[0].save(path, save_all=True, append_images=images[1:], duration=duration, loop=0)
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


def compile_functions(config, envs):
    """Compile init_state, update and act for this run's shapes, before the clock of charts/SPS starts.

    Returns init_fn(obs, seed), act_fn(params, buffer, key, obs, t) and update_fn(state, rollout, next_obs).
    """
    network, optimizer = make_network(envs), make_optimizer(config)
    # init runs once: optimizing it would take longer than running it.
    quick = {"xla_backend_optimization_level": 0}
    init_fn = jax.jit(partial(init_state, network, optimizer), compiler_options=quick)
    act_fn = jax.jit(partial(act, network.apply), donate_argnums=1)
    update_fn = jax.jit(partial(update, config, network.apply, optimizer), donate_argnums=0)

    obs, shape = envs.observation_space, (config.num_steps, config.num_envs)
    obs, seed, t = (jax.ShapeDtypeStruct(*x) for x in ((obs.shape, obs.dtype), ((), np.uint32), ((), np.int32)))
    state, buffer = jax.eval_shape(init_fn, obs, seed), make_buffer(config, obs)
    reward, flags = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct(shape, bool)
    data = Rollout(*buffer, reward, flags, flags, flags)
    return (
        init_fn.lower(obs, seed).compile(),
        act_fn.lower(state.params, buffer, state.key, obs, t).compile(),
        update_fn.lower(state, data, obs).compile(),
    )


def named_metrics(metrics, episodes):
    """The row of metrics.csv, floats by the names in COLUMNS, from what `update` and `rollout` returned."""
    charts = ("learning_rate", "clip_coef")
    row = {("charts/" if name in charts else "losses/") + name: float(x) for name, x in metrics.items()}
    return row | (dict(zip(EPISODE_COLUMNS, np.mean(episodes, axis=0).tolist())) if episodes else {})


def learn(config, run_dir):
    """Train to the end, from the newest checkpoint in run_dir if config.resume. Returns (state, seconds, sps).

    Raises KeyboardInterrupt after Ctrl-C or SIGTERM, with a checkpoint saved, and FloatingPointError where a
    loss or a parameter is not finite, with the last good checkpoint left alone.
    """
    began = time.monotonic()
    envs = make_envs(config, config.num_envs)
    init_fn, act_fn, update_fn = compile_functions(config, envs)
    buffer = make_buffer(config, envs.observation_space)
    state, seconds = init_fn(buffer[0][0], np.uint32(config.seed)), 0.0
    if config.resume and any(run_dir.glob("checkpoints/*.msgpack")):  # else it died before the first one
        state, seconds = load_checkpoint(run_dir, state)
    first = int(state.update)
    obs, _ = envs.reset(seed=env_seed(config.seed, first))
    ended = np.zeros(config.num_envs, bool)
    sps = first * config.batch_size / max(seconds, 1e-9)  # stands if nothing but the evaluation is left to do
    began, compiled = began - seconds, time.monotonic()
    recorder = Recorder(run_dir, config, frames=first * config.batch_size)
    with interrupts_noted() as interrupts, closing(envs), closing(recorder):
        for number in range(first + 1, config.num_updates + 1):
            state, buffer, data, obs, ended, episodes = rollout(config, act_fn, envs, state, buffer, obs, ended)
            state, metrics = update_fn(state, data, obs)
            metrics = jax.device_get(metrics)  # waits for the update, so the times below are of finished work
            finite, frames, now = metrics.pop("finite"), number * config.batch_size, time.monotonic()
            seconds, sps = now - began, (number - first) * config.batch_size / max(now - compiled, 1e-9)
            recorder.record(frames, seconds, named_metrics(metrics, episodes) | {"charts/SPS": sps})
            if not finite:
                raise FloatingPointError(f"loss or parameters not finite after {frames:,} frames, so not saved")
            if number % config.checkpoint_every == 0 or number == config.num_updates or interrupts:
                save_checkpoint(run_dir, state, seconds)
            if interrupts:
                raise KeyboardInterrupt(f"stopped after {frames:,} frames; go on with --resume {run_dir}")
    return state, seconds, sps


def train(config):
    """Train, evaluate and draw the agent, or go on with the run in config.resume. Returns what result.json holds.

    Raises UsageError, before anything is written, if config cannot be run; and see `learn`.
    """
    if config.resume:
        config = replace(load_config(config.resume), resume=config.resume)
    check_config(config)
    check_env(config)
    run_dir = Path(config.resume) if config.resume else create_run_dir(config)
    result_path, frames = run_dir / "result.json", config.num_updates * config.batch_size
    if result_path.exists():
        print(f"{run_dir} is finished, after {frames:,} frames: see {result_path}")
        return json.loads(result_path.read_text())
    print(f"{config.env_id}: {frames:,} frames in {config.num_updates:,} updates, into {run_dir}", flush=True)

    state, seconds, sps = learn(config, run_dir)
    evaluation = evaluate(config, state.params, config.eval_episodes, config.seed)
    record_gif(config, state.params, run_dir / "agent.gif", config.seed)
    result = {"env_id": config.env_id, "seed": config.seed, "frames": frames}
    result |= {"seconds": round(seconds, 3), "sps": round(sps, 1)} | evaluation.summary()
    result["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    result["device"] = jax.devices()[0].device_kind
    write_json(result_path, result)
    print(f"{frames:,} frames in {seconds:.1f} s ({sps:,.0f} frames/s after compiling); {evaluation}")
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
    saved = replace(load_config(source), run_dir=None)
    config = tyro.cli(Config, args=args, description=__doc__, default=saved)
    free = ("evaluate", "run_dir", "seed", "eval_episodes", "eval_max_steps") if config.evaluate else ("resume",)
    for field in fields(config):
        if field.name not in free and getattr(config, field.name) != getattr(saved, field.name):
            raise UsageError(f"{flag(field.name)} cannot be changed: {source} has its own settings")
    return config


def main(args=None):
    """Run a command line; returns the exit code: 0 well, 1 diverged, 2 bad input, 130 interrupted."""
    try:
        config = parse_args(args)
        evaluate_run(config) if config.evaluate else train(config)
        return 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(error if error.args else "interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
