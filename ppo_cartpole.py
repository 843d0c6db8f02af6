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

    python ppo_cartpole.py                         # train CartPole-v1, evaluate, draw agent.gif
    python ppo_cartpole.py --env-id Acrobot-v1     # any flat Box observation, Discrete actions
    python ppo_cartpole.py --resume runs/NAME      # go on after a kill or Ctrl-C
    python ppo_cartpole.py --evaluate runs/NAME    # play a trained agent
    tensorboard --logdir runs                      # look at the curves

The default run plays 100,000 frames, takes about 8 seconds on 2 CPU cores and ends with a greedy
evaluation: 500.0, the maximum. One frame is one decision of the agent in one environment.

PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347. The details that matter: Huang et al. 2022,
"The 37 Implementation Details of PPO", ICLR blog track.
"""

import contextlib
import fcntl
import hashlib
import json
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

    env_id: str = "CartPole-v1"  # any with a flat Box observation and Discrete actions
    seed: int = 1  # of parameters, actions, minibatches and environments: 0 to 2**32 - 1
    total_frames: int = 100_000  # of all environments together; rounded down to whole updates
    num_envs: int = 32  # environments that play side by side
    num_steps: int = 32  # steps of each from one update to the next, so num_envs * num_steps rows
    num_minibatches: int = 16  # parts into which the rows of an update are shuffled
    update_epochs: int = 8  # passes over these rows
    learning_rate: float = 1e-3  # step size of Adam
    anneal: bool = True  # take learning rate and clip range linearly to zero over the run
    reward_scale: float = 1.0  # factor on the rewards that the learner sees, not on the returns
    gamma: float = 0.98  # discount: what a reward is worth one step before it comes
    gae_lambda: float = 0.8  # 0: advantages from one step and the values; 1: from the whole return
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

    batch_size = property(lambda self: self.num_envs * self.num_steps)  # rows of one update
    num_updates = property(lambda self: self.total_frames // self.batch_size)
    annealed = property(lambda self: optax.linear_schedule(1.0, 1.0 - self.anneal, self.num_updates))  # 1 to 1/n

    def __post_init__(self):
        """Take NumPy's numbers and paths for what they are; UsageError for what cannot be run."""
        ranges = dict(seed=(0, 2**32 - 1), gamma=(0, 1), gae_lambda=(0, 1), vf_coef=(0, 1e9), ent_coef=(0, 1e9))
        words = {int: "a whole number", int | None: "a whole number", float: "a number", bool: "True or False"}
        for field in fields(self):
            flag, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            value = value.item() if hasattr(value, "item") else value
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if field.type in (int, float, int | None) and type(value) is not bool:
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    value = float(value)  # 1e7 is a whole number too
                    value = int(value) if field.type is not float and value.is_integer() else value
            check(isinstance(value, field.type), f"{flag} must be {words.get(field.type, 'text')}, got {value!r}")
            if field.type in (int, float):
                low, high = ranges.get(field.name, (1 if field.type is int else 1e-9, 10**12))
                check(low <= value <= high, f"{flag} must be from {low} to {high}, got {value}")
            object.__setattr__(self, field.name, value)
        rows = f"--num-envs {self.num_envs} * --num-steps {self.num_steps} = {self.batch_size} rows"
        even = self.batch_size % self.num_minibatches == 0
        check(even, f"--num-minibatches {self.num_minibatches} does not divide {rows}")
        check(self.num_updates > 0, f"--total-frames {self.total_frames} is below an update of {rows}")


def make_envs(config, num_envs, **kwargs):
    """`num_envs` copies of the environment, stepped together. UsageError if this script cannot play it.
    Autoreset mode NEXT_STEP: the step after an episode's last ignores its action and returns the
    first observation of the next, so the last observation of an episode is seen like any other."""
    name = f"--env-id {config.env_id}"
    try:  # the environment's own vector class where it has one: CartPole's computes all poles in one go
        envs = gym.make_vec(config.env_id, num_envs, **kwargs)
    except Exception as error:  # anybody's environment, so any exception
        raise UsageError(f"{name}: {error}") from None
    obs, action = envs.single_observation_space, envs.single_action_space
    flat = isinstance(obs, gym.spaces.Box) and len(obs.shape) == 1
    discrete = isinstance(action, gym.spaces.Discrete) and action.start == 0
    check(flat and discrete, f"{name} has {obs} and {action}, not flat Box and Discrete from 0")
    check(envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP, f"{name} lacks mode NEXT_STEP")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=config.batch_size)


def env_seed(seed, stream):
    """Seed of envs: stream k from update k on, -1 for evaluation. Hashed: environment i gets it + i."""
    return int(np.random.SeedSequence([seed, stream % 2**32]).generate_state(1)[0])


class ActorCritic(nn.Module):  # obs [B, D] -> (logits [B, num_actions], value [B]), float32
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        def mlp(outputs, output_scale):  # one for the policy, one for the value: they share nothing
            x = obs.astype(jnp.float32)
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(output_scale))(x)

        return mlp(self.num_actions, 0.01), mlp(1, 1.0)[:, 0]  # 0.01: nearly uniform at first


def make_network(envs):
    return ActorCritic(num_actions=int(envs.single_action_space.n))


class Categorical:  # the policy behind logits [B, A]; for continuous actions, see make_envs and make_network too
    def __init__(self, logits):  # finite even where a logit is -inf, so that p * log p is 0 and not NaN
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
    Step t ended its episode if done[t]: for good where terminated[t] (the future is worth 0), else
    by a time limit (it is worth what the value function says). values[t + 1] is of the observation
    step t led to: NEXT_STEP returns an episode's last too. The row after done[t] is the reset: mask it.
    rewards, values, terminated, done: [T, N], T steps of N environments; next_value: [N], after them.
    Returns (advantages, returns), [T, N]; returns, advantages + values, are the value's targets."""
    next_values = jnp.concatenate([values[1:], next_value[None]])
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values

    def step(advantage, row):
        delta, ended = row
        advantage = delta + gamma * gae_lambda * jnp.where(ended, 0.0, advantage)
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(next_value), (deltas, done), reverse=True)
    return advantages, advantages + values


class Batch(NamedTuple):  # one minibatch of B rows
    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B] int32
    log_prob: jax.Array  # [B], of the action under the policy that chose it
    advantage: jax.Array  # [B]
    target: jax.Array  # [B], what the value should be
    valid: jax.Array  # [B], False in reset rows, which count in nothing


def ppo_loss(params, apply_fn, batch, clip_coef, vf_coef, ent_coef):
    """Clipped surrogate loss (arXiv 1707.06347, equations 7 and 9), averaged over the valid rows.
    apply_fn(params, obs) -> (logits [B, A], value [B]); batch: Batch of B rows.
    Returns (loss, metrics): a scalar, and a dict of scalars, policy_loss, value_loss, entropy,
    approx_kl (http://joschu.net/blog/kl-approx.html, k3) and clip_fraction."""
    logits, value = apply_fn(params, batch.obs)
    policy = Categorical(logits)

    def mean(x):
        return jnp.where(batch.valid, x, 0.0).sum() / jnp.maximum(batch.valid.sum(), 1)

    center = mean(batch.advantage)
    advantage = batch.advantage - center
    # Twice, since `center` is rounded: of equal advantages, that error would be all that is left.
    advantage = advantage - mean(advantage)
    advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8 * (1.0 + jnp.abs(center)))
    # exp overflows beyond 88, and inf * 0 in the gradient is NaN. exp(20) is clipped anyway.
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


class TrainState(NamedTuple):  # what training carries from one update to the next, and a checkpoint keeps
    params: dict
    opt_state: optax.OptState
    key: jax.Array  # typed PRNG key
    update: jax.Array  # int32, updates done


class Rollout(NamedTuple):  # T steps of N environments, time-major [T, N, ...]
    obs: np.ndarray  # what the agent saw
    action: np.ndarray  # int32, what it did
    log_prob: np.ndarray  # float32, of that action
    value: np.ndarray  # float32, of that observation
    reward: np.ndarray  # float32, what it got
    terminated: np.ndarray  # bool, this step ended the episode for good
    done: np.ndarray  # bool, this step ended the episode by termination or truncation
    valid: np.ndarray  # bool, False where the environment reset instead of taking the action


def make_optimizer(config):
    """Gradient clipping, then Adam, on all parameters as one vector, which compiles sooner."""
    minibatches = config.update_epochs * config.num_minibatches  # of one update: what Adam counts
    adam = optax.adam(lambda step: config.learning_rate * config.annealed(step // minibatches), eps=1e-5)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam))


def init_state(network, optimizer, obs, seed):
    """The TrainState at the start of a run; obs: [N, ...], any. Runs once: to optimize it takes longer."""
    params_key, key = jax.random.split(jax.random.key(seed))
    params = network.init(params_key, obs)
    return TrainState(params, optimizer.init(params), key, jnp.int32(0))


def update(config, apply_fn, optimizer, state, rollout, next_obs):
    """One PPO update: advantages, then update_epochs passes over the shuffled rows in minibatches.
    state: TrainState; rollout: Rollout [T, N]; next_obs: [N, ...], after the last step. Returns
    (TrainState, metrics): scalars as in metrics.csv, losses averaged; "finite", False if lost."""
    _, next_value = apply_fn(state.params, next_obs)
    rewards, ends = config.reward_scale * rollout.reward, (rollout.terminated, rollout.done)
    advantages, targets = compute_gae(rewards, rollout.value, next_value, *ends, config.gamma, config.gae_lambda)
    batch = Batch(rollout.obs, rollout.action, rollout.log_prob, advantages, targets, rollout.valid)
    batch = jax.tree.map(lambda x: x.reshape(config.batch_size, *x.shape[2:]), batch)
    fraction = config.annealed(state.update)
    key, shuffle_key = jax.random.split(state.key)
    order = jnp.tile(jnp.arange(config.batch_size), (config.update_epochs, 1))
    order = jax.random.permutation(shuffle_key, order, axis=1, independent=True)  # each epoch anew
    rows = order.reshape(config.update_epochs * config.num_minibatches, -1)
    coefs = config.clip_coef * fraction, config.vf_coef, config.ent_coef

    def minibatch_step(carry, rows):
        params, opt_state = carry
        minibatch = jax.tree.map(lambda x: jnp.asarray(x)[rows], batch)
        grads, losses = jax.grad(ppo_loss, has_aux=True)(params, apply_fn, minibatch, *coefs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    (params, opt_state), losses = jax.lax.scan(minibatch_step, (state.params, state.opt_state), rows)
    metrics = {f"losses/{name}": x.mean() for name, x in losses.items()}
    metrics["losses/explained_variance"] = explained_variance(rollout.value, targets, rollout.valid)
    metrics["charts/learning_rate"] = config.learning_rate * fraction
    metrics["charts/clip_coef"] = config.clip_coef * fraction
    lost = metrics["losses/policy_loss"] + metrics["losses/value_loss"] + optax.tree.norm(params)
    return TrainState(params, opt_state, key, state.update + 1), metrics | {"finite": jnp.isfinite(lost)}


def explained_variance(values, returns, valid):
    """1 - Var(returns - values) / Var(returns): 1: perfect, 0: a constant guess or equal returns."""
    return_var, error_var = jnp.var(returns, where=valid), jnp.var(returns - values, where=valid)
    varies = return_var > 1e-12 * jnp.mean(returns**2, where=valid)  # by more than rounding
    return jnp.where(varies, 1.0 - error_var / jnp.where(varies, return_var, 1.0), 0.0)


def act(apply_fn, params, key, obs):
    """Choose actions for obs [N, ...]: ((action, its log-probability, value), each [N], next key)."""
    key, action_key = jax.random.split(key)
    logits, value = apply_fn(params, obs)
    policy = Categorical(logits)
    action = policy.sample(action_key)
    return (action, policy.log_prob(action), value), key


def rollout(config, act_fn, envs, state, obs, ended):
    """Play num_steps steps in every environment: one call and one read by the host each.
    obs [N, ...] and ended, bool [N] (the step to obs ended an episode), are of the last rollout.
    Returns (Rollout, state with the next key, obs, ended)."""
    key, rows = state.key, []
    for _ in range(config.num_steps):
        choice, key = act_fn(state.params, key, obs)
        seen, choice, valid = np.array(obs), jax.device_get(choice), ~ended
        obs, reward, terminated, truncated, _ = envs.step(choice[0])
        ended = terminated | truncated
        rows.append(Rollout(seen, *choice, np.float32(reward), terminated, ended, valid))
    return Rollout(*map(np.stack, zip(*rows))), state._replace(key=key), obs, ended


def check_finite(name, x, start):
    """FloatingPointError if x [T, N, ...], of the environments' steps from `start` on, is not finite."""
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        step, env, *_ = bad[0]
        raise FloatingPointError(f"the {name} of environment {env} is not finite in its step {start + step:,}")


def evaluate(config, params, episodes, seed, pictures=None):
    """Play whole episodes with the most likely actions, each in its own environment: else short ones come first.
    pictures: a list, which gets every second one of the first episode. Returns a dict of arrays [episodes]: returns,
    float64, undiscounted; lengths, int, in frames; capped, bool, where config.eval_max_steps cut the episode."""
    envs = make_envs(config, episodes, **({} if pictures is None else {"render_mode": "rgb_array"}))
    network = make_network(envs)
    choose = jax.jit(lambda params, obs: Categorical(network.apply(params, obs)[0]).mode())
    obs, _ = envs.reset(seed=env_seed(seed, -1))
    returns, lengths, playing = np.zeros(episodes), np.zeros(episodes, int), np.ones(episodes, bool)
    while playing.any() and lengths.max() < config.eval_max_steps:
        if pictures is not None and lengths[0] % 2 == 0:
            pictures.append(Image.fromarray(envs.render()[0]).reduce(2))
        obs, reward, terminated, truncated, _ = envs.step(np.asarray(choose(params, obs)))
        returns += np.where(playing, reward, 0.0)
        lengths += playing
        playing &= ~(terminated | truncated)
    envs.close()
    return {"returns": returns, "lengths": lengths, "capped": playing}


def report(config, params, run_dir):
    """Evaluate an agent, say how it did and draw it, into run_dir. Returns the eval_* keys."""
    returns, _, capped = evaluate(config, params, config.eval_episodes, config.seed).values()
    mean, std, capped = returns.mean().item(), returns.std().item(), capped.sum().item()
    cut = f", {capped} cut at {config.eval_max_steps:,} steps (--eval-max-steps)" if capped else ""
    print(f"greedy return over {len(returns)} episodes: {mean:.1f} +- {std:.1f}{cut}; see {run_dir}")
    # pygame, which draws CartPole and its kin, must not open a window or a sound device, nor greet.
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", PYGAME_HIDE_SUPPORT_PROMPT="1")
    try:
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, which take several lines to say it
            evaluate(replace(config, eval_max_steps=250), params, 1, config.seed, pictures := [])
        pictures[0].save(run_dir / "agent.gif", save_all=True, append_images=pictures[1:], duration=40, loop=0)
    except Exception as error:  # a picture is not worth a finished run
        print("no agent.gif:", " ".join(repr(error).split()), file=sys.stderr)
    return dict(eval_return_mean=mean, eval_return_std=std, eval_episodes=len(returns), eval_capped=capped)


def make_run_dir(config):
    """Make the directory of a run: config.run_dir, or a new one under runs/. Returns its Path."""
    env_name, now = config.env_id.replace("/", "-"), time.strftime("%Y%m%d-%H%M%S")
    name = config.run_dir or f"runs/{Path(__file__).stem}__{env_name}__seed{config.seed}__{now}"
    for run_dir in [Path(name), *(Path(f"{name}_{copy}") for copy in range(2, 100))]:
        try:  # mkdir decides between runs of the same second
            run_dir.mkdir(parents=True, exist_ok=bool(config.run_dir))
            break
        except OSError as error:
            check(isinstance(error, FileExistsError) and not config.run_dir, f"--run-dir {run_dir}: {error}")
    taken = [*run_dir.glob("config.json"), *run_dir.glob("evaluation.json")]
    check(not taken, f"--run-dir {run_dir} already holds a run; --resume {run_dir} goes on with it")
    return run_dir


def lock_run(run_dir):
    """Open metrics.csv; until it is closed or this process ends, no other can train in run_dir."""
    file = open(run_dir / "metrics.csv", "a+", newline="")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # also on a file system without locks, which does without
        check(not isinstance(error, BlockingIOError), f"another process is training in {run_dir}")
    return file


def load_config(run_dir):
    """The Config that a run was started with. Raises UsageError if there is no such run."""
    try:
        return Config(**json.loads(Path(run_dir, "config.json").read_text()))
    except Exception as error:  # no file, no JSON, no Config
        raise UsageError(f"{run_dir} has to be the directory of a run: {error}") from None


def write(file, data):
    """Write and flush. An error then names the file, which the system's of a full disk does not."""
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()  # now, since it would fail again later
        raise OSError(error.errno, error.strerror, file.name) from None


def write_atomically(path, data):
    """Write bytes: whenever the process is killed, `path` holds the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file, data)
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
    """(state, seconds) of a run. like: a TrainState of its shapes. UsageError if there is none such."""
    path = Path(run_dir, "checkpoint.msgpack")
    try:
        content = path.read_bytes()
        check(hashlib.sha256(content[32:]).digest() == content[:32], "it is damaged")
        saved = flax.serialization.from_bytes({"state": like, "seconds": 0.0}, content[32:])
        state = saved["state"]._replace(key=jax.random.wrap_key_data(saved["state"].key))
        check(jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, like), "it is of another network")
    except Exception as error:  # no file, or not one of this network and optimizer
        raise UsageError(f"{path} cannot be used: {error}") from None
    return jax.device_put(state), saved["seconds"]


class Recorder:  # what a run tells: metrics.csv, TensorBoard events, a progress bar or plain lines
    def __init__(self, file, frames, total):
        """file: metrics.csv; frames: of the checkpoint, beyond which rows are dropped; total: of the run."""
        self.csv, self.next_line = file, time.monotonic() + 10.0
        self.csv.seek(0)
        header, *rows = self.csv.readlines() if frames else [""]
        kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= frames]
        self.csv.truncate(len(header + "".join(kept)))
        self.events = open(Path(file.name).with_name(f"events.out.tfevents.{time.time_ns()}"), "wb")
        self.write_event(file_version="brain.Event:2")
        self.write_event(step=frames + 1, session_log={"status": "START"})  # drops older events from here
        self.bar = tqdm(total=total, initial=frames, unit="frame", unit_scale=True, disable=not sys.stderr.isatty())

    def write_event(self, **content):
        RecordWriter(self.events).write(Event(wall_time=time.time(), **content).SerializeToString())
        write(self.events, b"")  # flushes

    def record(self, row):
        """Add a row: numbers by name, frames first; NaN leaves a cell empty."""
        cells = {name: f"{x:.6g}" if "/" in name else f"{x}" for name, x in row.items() if not np.isnan(x)}
        if self.csv.tell() == 0:
            write(self.csv, ",".join(row) + "\n")
        write(self.csv, ",".join(cells.get(name, "") for name in row) + "\n")
        values = [{"tag": name, "simple_value": float(x)} for name, x in cells.items() if "/" in name]
        self.write_event(step=row["frames"], summary={"value": values})
        text = " ".join(f"{name} {cells.get(f'charts/{name}', '-')}" for name in ("episodic_return", "SPS"))
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(row["frames"] - self.bar.n)
        if self.bar.disable and time.monotonic() >= self.next_line:
            print(f"{row['frames']:,} of {self.bar.total:,} frames: {text}", flush=True)
            self.next_line += 10.0


def train(config):
    """Train, evaluate and draw an agent, or go on with a run. Returns what result.json holds.
    Raises UsageError, before it writes, if config cannot be run; FloatingPointError at numbers not finite."""
    if config.resume:
        config = replace(load_config(config.resume), resume=config.resume)
    envs = make_envs(config, config.num_envs)
    run_dir = Path(config.resume) if config.resume else make_run_dir(config)
    with lock_run(run_dir) as file:
        if (run_dir / "result.json").exists():
            print(f"{run_dir} is finished: see {run_dir}/result.json")
            return json.loads((run_dir / "result.json").read_text())
        if not config.resume:
            write_atomically(run_dir / "config.json", json.dumps(asdict(config), indent=2).encode())
        try:
            return learn(config, envs, run_dir, file)
        except BaseException as error:
            error.add_note(f"--resume {run_dir} goes on from {next(run_dir.glob('*.msgpack'), 'the start')}")
            raise


def learn(config, envs, run_dir, file):
    """The run, from its checkpoint if there is one; file: metrics.csv. Returns what result.json holds."""
    began, seconds, compiled, sps = time.monotonic(), 0.0, 0.0, 0.0
    network, optimizer = make_network(envs), make_optimizer(config)
    act_fn = jax.jit(partial(act, network.apply))
    update_fn = jax.jit(partial(update, config, network.apply, optimizer), donate_argnums=0)
    init_fn = jax.jit(partial(init_state, network, optimizer), compiler_options={"xla_backend_optimization_level": 0})
    state = init_fn(envs.observation_space.sample(), config.seed)
    if (run_dir / "checkpoint.msgpack").exists():
        state, seconds = load_checkpoint(run_dir, state)
        began -= seconds
    first, total, ended = int(state.update), config.num_updates * config.batch_size, np.zeros(config.num_envs, bool)
    print(f"{config.env_id}: {total:,} frames, into {run_dir}", flush=True)
    obs, _ = envs.reset(seed=env_seed(config.seed, first))
    recorder = Recorder(file, first * config.batch_size, total)
    with recorder.bar:
        for number in range(first, config.num_updates):
            data, state, obs, ended = rollout(config, act_fn, envs, state, obs, ended)
            check_finite("reward", data.reward, number * config.num_steps + 1)
            check_finite("observation", np.concatenate([data.obs, obs[None]]), number * config.num_steps)
            state, metrics = update_fn(state, data, obs)
            metrics = jax.device_get(metrics)  # waits for the update, so that it is timed
            seconds, frames = time.monotonic() - began, (number + 1) * config.batch_size
            compiled = compiled or seconds  # the first update compiles, so SPS begins after it
            sps = (number - first) * config.batch_size / max(seconds - compiled, 1e-9)
            row = {"frames": frames, "seconds": round(seconds, 3), "charts/SPS": sps or np.nan}
            for name, queue in (("return", envs.return_queue), ("length", envs.length_queue)):
                row[f"charts/episodic_{name}"] = np.mean(queue or np.nan)
                queue.clear()
            recorder.record(row | {name: x for name, x in metrics.items() if "/" in name})
            if not metrics["finite"]:
                raise FloatingPointError(f"loss or parameters not finite after {frames:,} frames, so not saved")
            if (number + 1) % config.checkpoint_every == 0 or number + 1 == config.num_updates:
                save_checkpoint(run_dir, state, seconds)
    sps = sps or total / max(seconds, 1e-9)  # if no update followed the first
    print(f"{total:,} frames in {seconds:.1f} s ({sps:,.0f} frames/s after compiling)")
    result = {"env_id": config.env_id, "seed": config.seed, "frames": total, "seconds": seconds, "sps": sps}
    result |= report(config, state.params, run_dir) | {"device": jax.devices()[0].device_kind}
    result["versions"] = {module.__name__: module.__version__ for module in (jax, flax, optax, gym)}
    write_atomically(run_dir / "result.json", json.dumps(result, indent=2).encode())
    return result


def evaluate_run(config):
    """Evaluate the agent of config.evaluate, into a directory of its own. Returns the eval_* keys."""
    envs = make_envs(config, 1)
    start = partial(init_state, make_network(envs), make_optimizer(config))
    state, _ = load_checkpoint(config.evaluate, jax.eval_shape(start, envs.observation_space.sample(), config.seed))
    run_dir = make_run_dir(config)
    result = report(config, state.params, run_dir)
    write_atomically(run_dir / "evaluation.json", json.dumps(result, indent=2).encode())
    return result


def parse_args(args):
    """The Config of a command line; with --resume or --evaluate, the settings of the run named."""
    text = tyro.constructors.PrimitiveConstructorSpec(1, "INT", lambda x: x[0], lambda x: True, lambda x: [str(x)])
    registry = tyro.constructors.ConstructorRegistry()  # for 1e7: Config says what is whole
    registry.primitive_rule(lambda kind: text if kind.type is int else None)
    parse = partial(tyro.cli, Config, args=args, description=__doc__, registry=registry)
    config = parse()
    if source := config.resume or config.evaluate:
        saved = replace(load_config(source), run_dir=None)
        config = parse(default=saved)
        free = ("evaluate", "run_dir", "seed", "eval_episodes", "eval_max_steps") if config.evaluate else ("resume",)
        for name, value in asdict(config).items():
            flag = "--" + name.replace("_", "-")
            check(name in free or value == getattr(saved, name), f"{flag} of {source} cannot be changed")
    return config


def main(args=None):
    """Run a command line; returns the exit code: 0 well, 1 failed, 2 bad input, 130 interrupted."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ppo-jax")
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if os.access(cache, os.W_OK) and not jax.config.jax_compilation_cache_dir:  # so that the next run starts sooner
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        config = parse_args(args)
        try:
            jax.devices()
        except Exception as error:  # JAX raises several kinds
            raise UsageError(f"no device for JAX_PLATFORMS={jax.config.jax_platforms}: {error!r}; try cpu") from None
        evaluate_run(config) if config.evaluate else train(config)
        return 0
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        words = [str(error) or "interrupted", *getattr(error, "__notes__", [])]
        print("error:", " ".join("; ".join(words).split()), file=sys.stderr)
        return {UsageError: 2, KeyboardInterrupt: 130}.get(type(error), 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    sys.exit(main())
