"""compute_gae: against the definition, worked examples and published faults."""

import numpy as np
import pytest
from conftest import gae_by_definition

from ppo_cartpole import compute_gae


def column(*numbers):
    return np.array(numbers, np.float32)[:, None]


def gae(rewards, values, next_value, terminated, done, gamma, gae_lambda):
    """compute_gae of one environment, from lists."""
    arrays = (column(*rewards), column(*values), np.float32([next_value]), column(*terminated), column(*done))
    advantages, returns = compute_gae(*arrays, gamma, gae_lambda)
    return np.asarray(advantages)[:, 0].tolist(), np.asarray(returns)[:, 0].tolist()


def random_rollout(seed, steps=12, envs=5):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, steps, envs)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    return rewards, values, rng.normal(size=envs).astype(np.float32), terminated, terminated | truncated


@pytest.mark.parametrize("gamma, gae_lambda", [
    (0.99, 0.95), (0.9, 1.0), (1.0, 0.5), (0.7, 0.0), (0.0, 0.9), (1.0, 1.0),
])  # fmt: skip
def test_equals_the_definition(gamma, gae_lambda):
    rollout = random_rollout(seed=0)
    advantages, returns = compute_gae(*rollout, gamma, gae_lambda)
    expected = gae_by_definition(*rollout, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, expected + rollout[1], rtol=1e-5, atol=1e-5)


def test_no_episode_end():
    advantages, returns = gae([1, 1, 1], [0.5] * 3, 0.5, [0, 0, 0], [0, 0, 0], 0.5, 0.5)
    assert advantages == [0.984375, 0.9375, 0.75]
    assert returns == [1.484375, 1.4375, 1.25]


def test_termination_bootstraps_nothing():
    # anthonytorlucci/rlevo#342: a done flag read one step off gives [.5, .9375, .75].
    advantages, returns = gae([1, 1, 1], [0.5] * 3, 0.5, [0, 1, 0], [0, 1, 0], 0.5, 0.5)
    assert advantages == [0.875, 0.5, 0.75]
    assert returns == [1.375, 1.0, 1.25]


def test_truncation_bootstraps_the_value_of_the_last_observation():
    # vwxyzjn/cleanrl#198. In autoreset mode NEXT_STEP the last observation's value is that of the next row.
    advantages, _ = gae([1, 1, 1], [0.5, 0.5, 9], 0.5, [0, 0, 0], [0, 1, 0], 0.5, 0.5)
    assert advantages[:2] == [2.0, 5.0]


def test_truncation_with_a_last_value_of_2():
    advantages, _ = gae([1, 1, 1], [0.5, 0.5, 2], 0.5, [0, 0, 0], [0, 1, 0], 0.5, 0.5)
    assert advantages[:2] == [1.125, 1.5]


@pytest.mark.parametrize("terminated", [0, 1])
def test_nothing_after_the_end_of_an_episode_reaches_into_it(terminated):
    # Toni-SM/skrl#224: the recursion has to be cut at a truncation too.
    flags = [0, terminated, 0, 0], [0, 1, 0, 0]
    before, _ = gae([1, 1, 0, 1], [0.5, 0.5, 2, 0.5], 0.5, *flags, 0.5, 0.5)
    after, _ = gae([1, 1, 7, 8], [0.5, 0.5, 2, 9.0], 6.0, *flags, 0.5, 0.5)
    assert before[:2] == after[:2]


@pytest.mark.parametrize("value", [9, np.inf])
def test_a_reset_row_changes_no_step_around_it(value):
    # vwxyzjn/cleanrl#562: without a cut, what the reset row holds (here 9) leaks into the advantages.
    advantages, _ = gae([1, 1, 0, 1], [0.5, 0.5, value, 0.5], 0.5, [0, 1, 0, 0], [0, 1, 0, 0], 0.5, 0.5)
    assert [advantages[t] for t in (0, 1, 3)] == [0.875, 0.5, 0.75]


@pytest.mark.parametrize("terminated, done, advantage", [(0, 0, 0.75), (1, 1, 0.5), (0, 1, 0.75)])
def test_one_step_is_bootstrapped_unless_it_terminates(terminated, done, advantage):
    # vwxyzjn/cleanrl#16
    assert gae([1], [0.5], 0.5, [terminated], [done], 0.5, 0.5)[0] == [advantage]


def test_a_reward_at_the_end_is_credited_to_all_steps_before():
    # AechPro/rlgym-ppo PR#23
    assert gae([0, 0, 1], [0, 0, 0], 0, [0, 0, 1], [0, 0, 1], 1.0, 1.0)[0] == [1, 1, 1]


def test_the_callers_arrays_need_no_masking():
    # thu-ml/tianshou#869
    assert gae([1, 1, 1], [2, 2, 2], 2, [0, 0, 1], [0, 0, 1], 1.0, 1.0)[0][-1] == -1


@pytest.mark.parametrize("terminated", [0, 1])
def test_returns_with_lambda_1_are_discounted_sums(terminated):
    # ray-project/ray PR#59958
    _, returns = gae([1, 1, 1], [0, 0, 0], 0, [0, 0, terminated], [0, 0, 1], 0.99, 1.0)
    assert returns == pytest.approx([2.9701, 1.99, 1.0])


def test_environments_do_not_mix():
    rewards, values, next_value, terminated, done = random_rollout(2)
    together, _ = compute_gae(rewards, values, next_value, terminated, done, 0.9, 0.8)
    for n in range(5):
        one = slice(n, n + 1)
        alone, _ = compute_gae(
            rewards[:, one], values[:, one], next_value[one], terminated[:, one], done[:, one], 0.9, 0.8
        )
        np.testing.assert_allclose(together[:, one], alone, rtol=1e-6)


def test_result_is_float32_of_the_same_shape():
    for array in compute_gae(*random_rollout(3), 0.99, 0.95):
        assert array.shape == (12, 5)
        assert array.dtype == np.float32


def test_flags_may_be_floats():
    rewards, values, next_value, terminated, done = random_rollout(4)
    bools, _ = compute_gae(rewards, values, next_value, terminated, done, 0.9, 0.8)
    floats, _ = compute_gae(rewards, values, next_value, np.float32(terminated), np.float32(done), 0.9, 0.8)
    np.testing.assert_array_equal(bools, floats)


def test_10000_steps_without_an_end_stay_finite():
    ones, zeros = np.ones((10_000, 1), np.float32), np.zeros((10_000, 1), bool)
    advantages, _ = compute_gae(ones, 0 * ones, np.zeros(1, np.float32), zeros, zeros, 0.99, 1.0)
    assert advantages[0, 0] == pytest.approx(100.0, rel=1e-4)
