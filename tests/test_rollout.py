"""rollout and act: the autoreset mode, masks, truncation, episode statistics and the choice of actions.

In NEXT_STEP mode Counter(3) shows 0,1,2,3 and then, after a reset step that takes no action, 0 again.
"""

from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SCRIPTS, Counter, collect, counter, tiny
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

import ppo_cartpole as ppo


def counters(*lengths, end="terminated", **kwargs):
    envs = gym.vector.SyncVectorEnv([partial(Counter, length, end) for length in lengths], **kwargs)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def joined(played):
    """One long Rollout from several."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *[data for data, _, _ in played])


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 12])  # an end of an episode falls on the end of a rollout, or not
def test_stream_of_two_counters(num_steps, end):
    # vwxyzjn/cleanrl#562: the first row of a rollout is masked if the last one ended an episode.
    played = collect(tiny(num_steps=num_steps), counters(3, 4, end=end), rollouts=12 // num_steps)
    data = joined(played)
    np.testing.assert_array_equal(data.obs[..., 0].T, [[0, 1, 2, 3] * 3, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]])
    done = [[0, 0, 1, 0] * 3, [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]]
    valid = [[1, 1, 1, 0] * 3, [1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1]]
    np.testing.assert_array_equal(data.done.T, done)
    np.testing.assert_array_equal(data.valid.T, valid)
    np.testing.assert_array_equal(data.reward.T, valid)  # a reset step has no reward
    np.testing.assert_array_equal(data.terminated.T, np.array(done) * (end == "terminated"))
    assert played[-1][1].tolist() == [[0], [2]]


@pytest.mark.parametrize("end, last", [("terminated", 1.0), ("truncated", 1.0 + 0.99 * 3.0)])
def test_truncation_is_bootstrapped_from_the_last_observation(end, last):
    # The value of an observation is its number, so that of the last observation is 3 and that of the first 0.
    data = joined(collect(tiny(num_steps=8), counters(3, 3, end=end)))
    _, returns = ppo.compute_gae(data.reward, data.value, np.zeros(2), data.terminated, data.done, 0.99, 1.0)
    expected = [1 + 0.99 * (1 + 0.99 * last), 1 + 0.99 * last, last]
    np.testing.assert_allclose(returns[:3, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(returns[4:7, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_episodes_are_reported_once_and_whole(end):
    # vwxyzjn/cleanrl#454: never 6. Farama-Foundation/Gymnasium#1017: lengths of later episodes are right too.
    ((_, _, episodes),) = collect(tiny(num_steps=9), counters(3, 4, end=end))
    assert episodes == [(3.0, 3), (4.0, 4), (3.0, 3), (4.0, 4)]


def test_an_episode_longer_than_a_rollout_is_reported_whole():
    played = collect(tiny(num_steps=3), counters(7, 100), rollouts=3)
    assert [episodes for _, _, episodes in played] == [[], [], [(7.0, 7)]]


def test_observations_are_kept_though_the_environment_reuses_its_array():
    # jax-ml/jax#37830
    data = joined(collect(tiny(num_steps=6), counters(100, 100, copy=False)))
    np.testing.assert_array_equal(data.obs[..., 0].T, [[0, 1, 2, 3, 4, 5]] * 2)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int32"])
def test_observations_keep_their_dtype(dtype):
    config = tiny(env_id=counter(3, dtype=dtype))
    data = joined(collect(config, ppo.make_envs(config, 2)))
    assert data.obs.dtype == dtype
    assert data.obs[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_everything_else_has_the_documented_dtype():
    data = joined(collect(tiny(), counters(3, 4)))
    dtypes = [array.dtype.name for array in data]
    assert dtypes == ["float32", "int32", "float32", "float32", "float32", "bool", "bool", "bool"]


def test_value_and_log_prob_are_those_of_the_row():
    def apply_fn(params, obs):
        return jnp.concatenate([0.2 * obs, -0.1 * obs], axis=-1), 10 * obs[:, 0]

    data = joined(collect(tiny(num_steps=12), counters(20, 20), apply_fn))
    np.testing.assert_array_equal(data.value, 10 * data.obs[..., 0])
    logits = data.obs * [0.2, -0.1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(set(data.action.flat)) > 1
    expected = np.take_along_axis(log_probs, data.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(data.log_prob, expected, atol=1e-5)


def test_actions_reach_the_environment():
    config = tiny(env_id=counter(100, reward="action"), num_steps=16)
    data = joined(collect(config, ppo.make_envs(config, 2)))
    np.testing.assert_array_equal(data.reward, data.action)


def test_equal_logits_give_different_actions_in_steps_environments_and_rollouts():
    first, second = (data.action for data, _, _ in collect(tiny(num_steps=24), counters(100, 100), rollouts=2))
    assert 8 < first.sum() < 40
    assert not np.array_equal(first[:, 0], first[:, 1])
    assert not np.array_equal(first, second)
    assert not all(np.array_equal(first[0], row) for row in first)


def test_rollouts_do_not_share_memory():
    # A rollout may still be read by the last update while the next one is written.
    (first, *_), (second, *_) = collect(tiny(), counters(3, 4, copy=False), rollouts=2)
    for array, other in zip(first, second):
        assert not np.shares_memory(array, other)


def test_cartpole_is_its_vector_class_in_mode_next_step():
    # Farama-Foundation/Gymnasium#914
    envs = ppo.make_envs(tiny(), 3)
    assert isinstance(envs.unwrapped, CartPoleVectorEnv)
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP


def test_environments_of_one_run_start_differently():
    obs, _ = ppo.make_envs(tiny(env_id="Draw-v0"), 4).reset(seed=ppo.env_seed(1, 0))
    assert len(set(obs[:, 0].tolist())) == 4


def test_no_two_runs_share_a_seed_of_an_environment_nor_training_and_evaluation():
    streams = (0, 1, 2, 50, -1)
    starts = sorted(ppo.env_seed(seed, stream) for seed in range(20) for stream in streams)
    assert min(np.diff(starts)) > 100  # environment i gets the seed + i


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named_by_environment_and_step(name, bad):
    x = np.zeros((4, 3, 2), np.float32)
    SCRIPTS[name].check_finite("reward", x, 0)
    x[2, 1, 1] = x[3, 0, 0] = bad
    with pytest.raises(FloatingPointError, match="reward of environment 1 .*step 1,002"):
        SCRIPTS[name].check_finite("reward", x, 1000)
    SCRIPTS[name].check_finite("observation", np.zeros((2, 3, 4), np.uint8), 0)
