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
"""Proximal Policy Optimization (PPO) from a vector of numbers, in one file: JAX, Flax and Optax.

    python ppo_cartpole.py                              # train CartPole-v1, evaluate, draw agent.gif
    python ppo_cartpole.py --env-id Acrobot-v1          # any flat Box observation, Discrete actions
    python ppo_cartpole.py --resume runs/NAME           # go on after a kill or Ctrl-C
    python ppo_cartpole.py --evaluate runs/NAME         # play a trained agent
    tensorboard --logdir runs                           # look at the curves

The default run plays 100,000 frames, takes about 8 seconds on 2 CPU cores and ends with a greedy evaluation:
500.0, the maximum. One frame is one decision of the agent in one environment.

PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347
The details that matter: Huang et al. 2022, "The 37 Implementation Details of PPO", ICLR blog track
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import flax
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.linen.initializers import orthogonal
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm


class UsageError(Exception):
    """The user asked for something that cannot be done; the message says what."""


def check(condition, message):
    if not condition:
        raise UsageError(message)


@dataclass(frozen=True)
class Config:
    """Train a PPO agent, then evaluate it. Everything goes to a new directory under runs/."""

    env_id: str = "CartPole-v1"  # any Gymnasium environment with a flat Box observation and Discrete actions
    seed: int = 1  # of parameters, actions, minibatches and environments: 0 to 2**32 - 1
    total_frames: int = 100_000  # decisions of the agent, all environments together; rounded down to whole updates
    num_envs: int = 32  # environments that play side by side
    num_steps: int = 32  # steps of each environment from one update to the next
    num_minibatches: int = 16  # parts into which the num_envs * num_steps rows of an update are shuffled
    update_epochs: int = 8  # passes over these rows
    learning_rate: float = 1e-3  # step size of Adam
    anneal: bool = True  # take learning rate and clip range linearly to zero over the run
    reward_scale: float = 1.0  # factor on the rewards that the learner sees; reported returns are without it
    gamma: float = 0.98  # discount: what a reward is worth one step before it comes
    gae_lambda: float = 0.8  # 0: advantages from one step and the value function; 1: from the whole return
    clip_coef: float = 0.2  # how far a probability ratio may move from 1 before it stops to pay
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus, which keeps the policy exploring
    max_grad_norm: float = 0.5  # longer gradients are scaled down to this norm
    checkpoint_every: int = 10  # updates from one checkpoint to the next
    eval_episodes: int = 20  # episodes of the greedy evaluation at the end
    eval_max_steps: int = 10_000  # an evaluation episode is cut here and reported as capped
    run_dir: str | None = None  # directory of this run; without it, a new one under runs/
    resume: str | None = None  # run directory to go on with, under the settings it was started with
    evaluate: str | None = None  # run directory whose agent is evaluated; nothing is trained

    @property
    def batch_size(self):
        return self.num_envs * self.num_steps

    @property
    def num_updates(self):
        return self.total_frames // self.batch_size

    def __post_init__(self):
        """Take NumPy's numbers and paths for what they are; raise UsageError for what cannot be run."""
        ranges = {"seed": (0, 2**32 - 1), "gamma": (0, 1), "gae_lambda": (0, 1)}
        words = {int: "a whole number", float: "a number", bool: "True or False"}
        for field in fields(self):
            name, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            value = value.item() if hasattr(value, "item") else value
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if field.type in (int, float) and type(value) is not bool:
                with contextlib.suppress(TypeError, ValueError, OverflowError):  # 1e7, as people type it, is whole
                    value = field.type(float(value)) if float(value) == field.type(float(value)) else value
            check(isinstance(value, field.type), f"{name} must be {words.get(field.type, 'text')}, got {value!r}")
            if field.type in (int, float):
                low, high = ranges.get(field.name, (1 if field.type is int else 0, sys.maxsize))
                check(low <= value <= high, f"{name} must be from {low} to {high}, got {value}")
            object.__setattr__(self, field.name, value)
        above = min(self.learning_rate, self.reward_scale, self.clip_coef, self.max_grad_norm) > 0
        check(above, "--learning-rate, --reward-scale, --clip-coef and --max-grad-norm must be above 0")
        rows = f"--num-envs {self.num_envs} * --num-steps {self.num_steps} = {self.batch_size} rows"
        even = self.batch_size % self.num_minibatches == 0
        check(even, f"--num-minibatches {self.num_minibatches} does not divide {rows}")
        check(self.num_updates > 0, f"--total-frames {self.total_frames} is less than one update of {rows}")


def make_envs(config, num_envs, **kwargs):
    """`num_envs` copies of the environment, stepped together. Raises UsageError if this script cannot play it.

    Autoreset mode NEXT_STEP: the step after an episode's last ignores its action and returns the first
    observation of the next episode, so the last observation of every episode is seen like any other.
    """
    # Its own vector class where the environment has one: CartPoleVectorEnv computes all its poles in one go.
    try:
        envs = gym.make_vec(config.env_id, num_envs, **kwargs)
    except Exception as error:  # anybody's environment, so any exception
        raise UsageError(f"--env-id {config.env_id}: {error}") from None
    obs, action, mode = envs.single_observation_space, envs.single_action_space, envs.metadata.get("autoreset_mode")
    flat = isinstance(obs, gym.spaces.Box) and len(obs.shape) == 1
    discrete = isinstance(action, gym.spaces.Discrete) and action.start == 0
    check(flat and discrete, f"--env-id {config.env_id}: has {obs} and {action}, not flat Box and Discrete from 0")
    check(mode is gym.vector.AutoresetMode.NEXT_STEP, f"--env-id {config.env_id}: needs NEXT_STEP, has {mode}")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=config.batch_size)


def env_seed(seed, stream):
    """The seed of a vector environment: stream k for training from update k on, -1 for evaluation.

    Not the bare seed: environment i is seeded with it + i, so run 2 would begin with the episodes of run 1.
    """
    return int(np.random.SeedSequence([seed, stream % 2**32]).generate_state(1)[0])


class ActorCritic(nn.Module):
    """Policy and value of an observation [B, D]: logits [B, num_actions] and value [B], float32.

    Two networks that share nothing: with so few numbers to learn from, the value loss would pull a shared one about.
    """

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        # A small last layer makes the first policy nearly uniform, so it explores.
        logits = mlp(obs.astype(jnp.float32), self.num_actions, 0.01)
        value = mlp(obs.astype(jnp.float32), 1, 1.0)
        return logits, value[:, 0]


def mlp(x, outputs, output_scale):
    """Two hidden layers of 64, for the inside of a Flax module: [B, D] -> [B, outputs]."""
    for _ in range(2):
        x = nn.tanh(nn.Dense(64, kernel_init=orthogonal(math.sqrt(2)))(x))
    return nn.Dense(outputs, kernel_init=orthogonal(output_scale))(x)


class Categorical:
    """The policy behind logits [B, A], which is all that depends on the kind of action.

    For continuous actions, change this class, the network's last layer and the check of the action space.
    """

    def __init__(self, logits):
        # Finite even where a logit is -inf, so that p * log p is 0 and not NaN.
        self.log_probs = jnp.maximum(jax.nn.log_softmax(logits), jnp.finfo(logits.dtype).min)

    def sample(self, key):  # int32 [B]
        return jax.random.categorical(key, self.log_probs)

    def mode(self):  # the most likely action, int32 [B]
        return self.log_probs.argmax(-1)

    def log_prob(self, action):  # [B]
        return jnp.take_along_axis(self.log_probs, action[:, None], axis=-1)[:, 0]

    def entropy(self):  # in nats, [B]
        return -(jnp.exp(self.log_probs) * self.log_probs).sum(-1)


def compute_gae(rewards, values, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16).

    Step t got rewards[t] and ended its episode if done[t]: for good where terminated[t] (the future is worth 0),
    else by a time limit (it is worth what the value function says). values[t + 1] has to be the value of the
    observation that step t led to, and is: NEXT_STEP environments return the last observation of an episode too.
    The row after done[t] is the reset, not a step: what is computed there reaches no other row; mask it.

    rewards, values, terminated, done: [T, N], N environments for T steps; next_value: [N], the value of the
    observation after the last step; gamma and gae_lambda: in [0, 1].
    Returns (advantages, returns), [T, N]; returns are advantages + values, the targets of the value loss.
    """
    next_values = jnp.concatenate([values[1:], next_value[None]])
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values

    def step(advantage, row):
        delta, ended = row
        advantage = delta + gamma * gae_lambda * jnp.where(ended, 0.0, advantage)
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


def ppo_loss(params, apply_fn, batch, clip_coef, vf_coef, ent_coef):
    """Clipped surrogate loss (arXiv 1707.06347, equations 7 and 9), averaged over the valid rows.

    apply_fn(params, obs) -> (logits [B, A], value [B]); batch: Batch of B rows.
    Returns (loss, metrics): a scalar, and a dict of scalars, policy_loss, value_loss, entropy, approx_kl
    (http://joschu.net/blog/kl-approx.html, k3) and clip_fraction.
    """
    logits, value = apply_fn(params, batch.obs)
    policy = Categorical(logits)
    num_valid = jnp.maximum(batch.valid.sum(), 1)

    def mean(x):
        return jnp.where(batch.valid, x, 0.0).sum() / num_valid

    center = mean(batch.advantage)
    advantage = batch.advantage - center
    # Twice, since `center` is rounded: where all advantages are equal, that would be all there is to normalize.
    advantage = advantage - mean(advantage)
    advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8 * (1.0 + jnp.abs(center)))
    # exp overflows beyond 88, and inf * 0 in the gradient is NaN. A ratio of exp(20) is clipped anyway.
    log_ratio = jnp.clip(policy.log_prob(batch.action) - batch.log_prob, -20.0, 20.0)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_coef, 1.0 + clip_coef)
    metrics = {
        "policy_loss": -mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage)),
        "value_loss": mean((value - batch.target) ** 2),
        "entropy": mean(policy.entropy()),
        "approx_kl": mean(ratio - 1.0 - log_ratio),
        "clip_fraction": mean(jnp.abs(ratio - 1.0) > clip_coef),
    }
    return metrics["policy_loss"] + vf_coef * metrics["value_loss"] - ent_coef * metrics["entropy"], metrics


class TrainState(NamedTuple):
    """All that training carries from one update to the next, and a checkpoint keeps."""

    params: dict
    opt_state: optax.OptState
    key: jax.Array  # typed PRNG key
    update: jax.Array  # int32, updates done


class Rollout(NamedTuple):
    """T steps of N environments, time-major [T, N, ...]."""

    obs: np.ndarray  # what the agent saw
    action: np.ndarray  # int32, what it did
    log_prob: np.ndarray  # float32, of that action
    value: np.ndarray  # float32, of that observation
    reward: np.ndarray  # float32, what it got
    terminated: np.ndarray  # bool, this step ended the episode for good
    done: np.ndarray  # bool, this step ended the episode by termination or truncation
    valid: np.ndarray  # bool, False where the environment reset instead of taking the action


def anneal_fraction(config, update):
    """The part of learning rate and clip range used in update 0, 1, ...: 1 at first, 1/num_updates at last."""
    return jnp.maximum(1.0 - update / config.num_updates, 0.0) if config.anneal else jnp.float32(1.0)


def make_optimizer(config):
    """Gradient clipping, then Adam. Adam counts minibatches; the learning rate changes between updates only."""

    def learning_rate(step):
        return config.learning_rate * anneal_fraction(config, step // (config.update_epochs * config.num_minibatches))

    adam = optax.adam(learning_rate, eps=1e-5)
    # flatten: all parameters as one vector, which leaves a good deal less to compile.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam))


def init_state(network, optimizer, obs, seed):
    """The TrainState at the start of a run; obs: [N, ...], any observations."""
    params_key, key = jax.random.split(jax.random.key(seed))
    params = network.init(params_key, obs)
    return TrainState(params, optimizer.init(params), key, jnp.int32(0))


def update(config, apply_fn, optimizer, state, rollout, next_obs):
    """One PPO update: advantages, then update_epochs passes over the shuffled rows in num_minibatches parts.

    state: TrainState; rollout: Rollout [T, N]; next_obs: [N, ...], after the rollout's last step.
    Returns (TrainState, metrics): scalars by their names in metrics.csv, those of ppo_loss averaged over all
    minibatches; and "finite", False if the run is lost.
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
        minibatch = jax.tree.map(lambda x: jnp.asarray(x)[rows], batch)
        grads, losses = jax.grad(ppo_loss, has_aux=True)(
            params, apply_fn, minibatch, config.clip_coef * fraction, config.vf_coef, config.ent_coef
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    rows = order.reshape(config.update_epochs * config.num_minibatches, -1)
    (params, opt_state), losses = jax.lax.scan(minibatch_step, (state.params, state.opt_state), rows)
    metrics = {f"losses/{name}": x.mean() for name, x in losses.items()}
    metrics["losses/explained_variance"] = explained_variance(rollout.value, targets, rollout.valid)
    metrics["charts/learning_rate"] = config.learning_rate * fraction
    metrics["charts/clip_coef"] = config.clip_coef * fraction
    lost = metrics["losses/policy_loss"] + metrics["losses/value_loss"] + optax.tree.norm(params)
    return TrainState(params, opt_state, key, state.update + 1), metrics | {"finite": jnp.isfinite(lost)}


def explained_variance(values, returns, valid):
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 a constant guess; 0 too if all returns are equal."""
    return_var, error_var = jnp.var(returns, where=valid), jnp.var(returns - values, where=valid)
    varies = return_var > 1e-12 * jnp.mean(returns**2, where=valid)  # by more than rounding
    return jnp.where(varies, 1.0 - error_var / jnp.where(varies, return_var, 1.0), 0.0)


def act(apply_fn, params, key, obs):
    """Choose actions for obs [N, ...]: ((action, its log-probability, the value of obs), each [N], next key)."""
    key, action_key = jax.random.split(key)
    logits, value = apply_fn(params, obs)
    policy = Categorical(logits)
    action = policy.sample(action_key)
    return (action, policy.log_prob(action), value), key


def rollout(config, act_fn, envs, state, obs, ended):
    """Play num_steps steps in every environment with the policy of `state`: one call and one read by the host each.

    obs [N, ...] and ended, bool [N], are where the last rollout left off; ended: that step ended an episode.
    Returns (Rollout, state with the next key, obs, ended).
    """
    key, rows = state.key, []
    for _ in range(config.num_steps):
        choice, key = act_fn(state.params, key, obs)
        seen, choice, valid = np.array(obs), jax.device_get(choice), ~ended
        obs, reward, terminated, truncated, _ = envs.step(choice[0])
        ended = terminated | truncated
        rows.append(Rollout(seen, *choice, np.float32(reward), terminated, ended, valid))
    return Rollout(*map(np.stack, zip(*rows))), state._replace(key=key), obs, ended


def check_finite(name, x, start):
    """Raise FloatingPointError if x [T, N, ...], what the environments gave from step `start` on, is not finite."""
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        step, env, *_ = bad[0]
        raise FloatingPointError(f"the {name} of environment {env} is not finite in its step {start + step:,}")


def evaluate(config, params, episodes, seed, pictures=None):
    """Play `episodes` whole episodes, always with the most likely action.

    Each has an environment of its own: the first to finish in fewer ones would be the short ones, which are the bad
    ones. pictures: a list, to which those of the first episode are added.
    Returns a dict of arrays [episodes]: returns, float64, undiscounted; lengths, int, in frames; capped, bool, where
    config.eval_max_steps cut the episode.
    """
    envs = make_envs(config, episodes, **({} if pictures is None else {"render_mode": "rgb_array"}))
    network = ActorCritic(int(envs.single_action_space.n))
    choose = jax.jit(lambda params, obs: Categorical(network.apply(params, obs)[0]).mode())
    obs, _ = envs.reset(seed=env_seed(seed, -1))
    returns, lengths, playing = np.zeros(episodes), np.zeros(episodes, int), np.ones(episodes, bool)
    while playing.any() and lengths.max() < config.eval_max_steps:
        if pictures is not None:
            pictures.append(Image.fromarray(envs.render()[0]).reduce(2))
        obs, reward, terminated, truncated, _ = envs.step(np.asarray(choose(params, obs)))
        returns += np.where(playing, reward, 0.0)
        lengths += playing
        playing &= ~(terminated | truncated)
    envs.close()
    return {"returns": returns, "lengths": lengths, "capped": playing}


def report(config, params, run_dir):
    """Evaluate an agent, say how it did and draw it, into run_dir. Returns the eval_* keys of result.json."""
    returns, _, capped = evaluate(config, params, config.eval_episodes, config.seed).values()
    cut = f", {capped.sum()} cut at {config.eval_max_steps:,} steps (--eval-max-steps)" if capped.any() else ""
    print(f"greedy return over {len(returns)} episodes: {returns.mean():.1f} +- {returns.std():.1f}{cut}")
    # pygame, which draws CartPole and its kin, must neither open a window or a sound device, nor greet.
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")
    pictures = []
    try:
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, which take several lines to say it
            evaluate(replace(config, eval_max_steps=250), params, 1, config.seed, pictures)
        pictures[0].save(run_dir / "agent.gif", save_all=True, append_images=pictures[2::2], duration=40, loop=0)
    except Exception as error:  # a picture is not worth a finished run
        print("no agent.gif:", " ".join(f"{error!r}".split()), file=sys.stderr)
    summary = {"eval_return_mean": returns.mean().item(), "eval_return_std": returns.std().item()}
    return summary | {"eval_episodes": len(returns), "eval_capped": capped.sum().item()}


def make_run_dir(config):
    """Make a directory for what this run writes: config.run_dir, or a new one under runs/. Returns its Path."""
    env_name, now = config.env_id.replace("/", "-"), time.strftime("%Y%m%d-%H%M%S")
    run_dir = new = Path(config.run_dir or f"runs/{Path(__file__).stem}__{env_name}__seed{config.seed}__{now}")
    for copy in range(2, 100):
        with contextlib.suppress(FileExistsError):  # mkdir decides between two runs of the same second
            run_dir.mkdir(parents=True, exist_ok=bool(config.run_dir))
            break
        run_dir = new.with_name(f"{new.name}_{copy}")
    taken = any((run_dir / name).exists() for name in ("config.json", "evaluation.json"))
    check(not taken, f"--run-dir {run_dir} already holds a run; --resume {run_dir} goes on with it")
    return run_dir


def lock_run(run_dir):
    """Keep other processes from training in run_dir until the file returned, its config.json, is closed."""
    file = open(run_dir / "config.json", "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the system drops with the process
    except BlockingIOError:
        raise UsageError(f"another process is training in {run_dir}") from None
    except OSError:
        pass  # a file system without locks
    return file


def load_config(run_dir):
    """The Config that a run was started with. Raises UsageError if there is no such run."""
    check(not Path(run_dir).is_file(), f"{run_dir} is a file: name the directory of the run")
    try:
        return Config(**json.loads(Path(run_dir, "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{run_dir}: no run there: {error}") from None


def write_atomically(path, data):
    """Write bytes so that `path` holds the old content or the new one, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(run_dir, state, seconds):
    """Write state and run time so far into run_dir/checkpoint.msgpack, behind a digest of both."""
    state = state._replace(key=jax.random.key_data(state.key))
    data = flax.serialization.to_bytes({"state": state, "seconds": seconds})
    write_atomically(run_dir / "checkpoint.msgpack", hashlib.sha256(data).digest() + data)


def load_checkpoint(run_dir, like):
    """(state, seconds) of a run; like: a TrainState of the same shapes. Raises UsageError if there is none such."""
    path = Path(run_dir, "checkpoint.msgpack")
    try:
        content = path.read_bytes()
        check(hashlib.sha256(content[32:]).digest() == content[:32], "damaged")
        saved = flax.serialization.from_bytes({"state": like, "seconds": 0.0}, content[32:])
        state = saved["state"]._replace(key=jax.random.wrap_key_data(saved["state"].key))
        check(jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, like), "another network's")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:  # Flax's, whatever differs
        raise UsageError(f"{path} cannot be used: {error}") from None
    return jax.device_put(state), saved["seconds"]


class Recorder:
    """What a run tells while it trains: metrics.csv, a TensorBoard event file, and a progress bar or plain lines."""

    def __init__(self, run_dir, frames, total):
        """frames: how far the run is; rows beyond it, written after the checkpoint now resumed from, are dropped."""
        self.csv = open(run_dir / "metrics.csv", "a+", newline="")
        self.csv.seek(0)
        lines = self.csv.readlines() if frames else []
        kept = lines[:1] + [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= frames]
        self.csv.truncate(sum(map(len, kept)))
        self.events = open(run_dir / f"events.out.tfevents.{time.time_ns()}", "wb")
        self.bar = tqdm(total=total, initial=frames, unit="frame", unit_scale=True, disable=not sys.stderr.isatty())
        self.next_line = time.monotonic() + 10.0

    def record(self, row):
        """Add a row: numbers by name, frames first; NaN leaves a cell empty."""
        cells = {name: f"{x:.6g}" if "/" in name else f"{x}" for name, x in row.items() if not math.isnan(x)}
        header = "" if self.csv.tell() else ",".join(row) + "\n"
        self.csv.write(header + ",".join(cells.get(name, "") for name in row) + "\n")
        self.csv.flush()
        values = [{"tag": name, "simple_value": float(cell)} for name, cell in cells.items() if "/" in name]
        event = Event(wall_time=time.time(), step=row["frames"], summary={"value": values})
        RecordWriter(self.events).write(event.SerializeToString())
        self.events.flush()
        text = f"return {row['charts/episodic_return']:.6g}, {row['charts/SPS']:,.0f} frames/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(row["frames"] - self.bar.n)
        if self.bar.disable and time.monotonic() >= self.next_line:
            print(f"{row['frames']:,} of {self.bar.total:,} frames, {text}", flush=True)
            self.next_line += 10.0


def train(config):
    """Train, evaluate and draw an agent, or go on with the run in config.resume. Returns what result.json holds.

    Raises UsageError, before anything is written, if config cannot be run, and FloatingPointError where a number
    from the environment, a loss or a parameter is not finite.
    """
    if config.resume:
        config = replace(load_config(config.resume), resume=config.resume)
    envs = make_envs(config, config.num_envs)
    run_dir = Path(config.resume) if config.resume else make_run_dir(config)
    result_path, frames = run_dir / "result.json", config.num_updates * config.batch_size
    with lock_run(run_dir) as config_file:
        if result_path.exists():
            print(f"{run_dir} is finished, after {frames:,} frames: see {result_path}")
            return json.loads(result_path.read_text())
        if not config.resume:
            config_file.write(json.dumps(asdict(config), indent=2))
            config_file.flush()
        print(f"{config.env_id}: {frames:,} frames in {config.num_updates:,} updates, into {run_dir}", flush=True)
        try:
            params, seconds, sps = learn(config, envs, run_dir)
            print(f"{frames:,} frames in {seconds:.1f} s ({sps:,.0f} frames/s after compiling)")
            result = {"env_id": config.env_id, "seed": config.seed, "frames": frames, "seconds": seconds, "sps": sps}
            result |= report(config, params, run_dir)
            result["versions"] = {module.__name__: module.__version__ for module in (jax, flax, optax, gym)}
            result["device"] = jax.devices()[0].device_kind
            write_atomically(result_path, json.dumps(result, indent=2).encode())
        except BaseException as error:
            error.add_note(f"go on from the newest checkpoint with --resume {run_dir}")
            raise
    return result


def learn(config, envs, run_dir):
    """Train to the end, from the checkpoint in run_dir if there is one. Returns (params, seconds, frames/s)."""
    began, network, optimizer = time.monotonic(), ActorCritic(int(envs.single_action_space.n)), make_optimizer(config)
    act_fn = jax.jit(partial(act, network.apply))
    update_fn = jax.jit(partial(update, config, network.apply, optimizer), donate_argnums=0)
    state = jax.jit(partial(init_state, network, optimizer))(envs.observation_space.sample(), config.seed)
    seconds = sps = math.nan
    if (run_dir / "checkpoint.msgpack").exists():
        state, seconds = load_checkpoint(run_dir, state)
        began -= seconds
    first, ended = int(state.update), np.zeros(config.num_envs, bool)
    obs, _ = envs.reset(seed=env_seed(config.seed, first))
    recorder = Recorder(run_dir, first * config.batch_size, config.num_updates * config.batch_size)
    with recorder.bar:
        for number in range(first, config.num_updates):
            data, state, obs, ended = rollout(config, act_fn, envs, state, obs, ended)
            check_finite("reward", data.reward, number * config.num_steps + 1)
            check_finite("observation", np.concatenate([data.obs, obs[None]]), number * config.num_steps)
            state, metrics = update_fn(state, data, obs)
            metrics = jax.device_get(metrics)  # waits for the update, so the times below are of finished work
            seconds, frames = time.monotonic() - began, (number + 1) * config.batch_size
            if number == first:
                compiled = seconds  # the clock of charts/SPS starts after the first update, since that one compiles
            else:
                sps = (number - first) * config.batch_size / (seconds - compiled)
            row = {"frames": frames, "seconds": round(seconds, 3), "charts/SPS": sps}
            for name, queue in (("return", envs.return_queue), ("length", envs.length_queue)):
                row[f"charts/episodic_{name}"] = np.mean(queue or math.nan)
                queue.clear()
            finite = metrics.pop("finite")
            recorder.record(row | metrics)
            if not finite:
                raise FloatingPointError(f"loss or parameters not finite after {frames:,} frames, so not saved")
            if (number + 1) % config.checkpoint_every == 0 or number + 1 == config.num_updates:
                save_checkpoint(run_dir, state, seconds)
    return state.params, seconds, sps


def evaluate_run(config):
    """Evaluate the agent of the run in config.evaluate, into a directory of its own. Returns the eval_* keys."""
    envs = make_envs(config, 1)
    start = partial(init_state, ActorCritic(int(envs.single_action_space.n)), make_optimizer(config))
    state, _ = load_checkpoint(config.evaluate, jax.eval_shape(start, envs.observation_space.sample(), config.seed))
    run_dir = make_run_dir(config)
    result = report(config, state.params, run_dir)
    write_atomically(run_dir / "evaluation.json", json.dumps(result, indent=2).encode())
    return result


def parse_args(args):
    """The Config of a command line; with --resume or --evaluate, the settings of the run that it names."""
    text = tyro.constructors.PrimitiveConstructorSpec(1, "INT", lambda x: x[0], lambda x: True, lambda x: [str(x)])
    registry = tyro.constructors.ConstructorRegistry()  # for 1e7: Config is to say what is a whole number, not tyro
    registry.primitive_rule(lambda kind: text if kind.type is int else None)
    parse = partial(tyro.cli, Config, args=args, description=__doc__, registry=registry)
    config = parse()
    source = config.resume or config.evaluate
    if not source:
        return config
    check(not (config.resume and config.evaluate), "--resume and --evaluate exclude each other")
    saved = replace(load_config(source), run_dir=None)
    config = parse(default=saved)
    free = ("evaluate", "run_dir", "seed", "eval_episodes", "eval_max_steps") if config.evaluate else ("resume",)
    for name, value in asdict(config).items():
        fixed = name not in free and value != getattr(saved, name)
        check(not fixed, f"--{name.replace('_', '-')} cannot be changed: {source} has its own settings")
    return config


def main(args=None):
    """Run a command line; returns the exit code: 0 well, 1 failed, 2 bad input, 130 interrupted."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ppo-jax")
    if not jax.config.jax_compilation_cache_dir:  # for what is compiled, so that the next run starts sooner
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        config = parse_args(args)
        try:
            jax.devices()
        except RuntimeError as error:
            raise UsageError(f"{error}; JAX_PLATFORMS=cpu before the command runs it on the CPU") from None
        evaluate_run(config) if config.evaluate else train(config)
        return 0
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        words = [str(error) or "interrupted", *getattr(error, "__notes__", [])]
        print("error:", " ".join("; ".join(words).split()), file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 130 if isinstance(error, KeyboardInterrupt) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    sys.exit(main())
