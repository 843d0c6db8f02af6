"""ppo_loss, the policy and the networks: against closed forms, a NumPy version, and published faults."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SCRIPTS, linear

from ppo_cartpole import Batch, Categorical, explained_variance, ppo_loss


@pytest.fixture(autouse=True)
def no_accidental_broadcasting():
    # jax-ml/jax#2697: [B, 1] minus [B] is [B, B] without a word.
    with jax.numpy_rank_promotion("raise"):
        yield


def table(params, obs):
    """Logits and values are the parameters themselves, row by row."""
    return params["logits"], params["value"]


def batch_with(log_ratio, advantage, value=0.0, target=0.0, valid=True):
    """(params, Batch) for `table` with two equally likely actions and these log ratios."""
    log_ratio = np.float32(log_ratio)

    def full(x, dtype):
        return np.broadcast_to(np.asarray(x, dtype), log_ratio.shape)

    params = {"logits": np.zeros((*log_ratio.shape, 2), np.float32), "value": full(value, np.float32)}
    log_prob = np.float32(math.log(0.5)) - log_ratio
    rows = (np.zeros_like(log_ratio), full(0, np.int32), log_prob, full(advantage, np.float32))
    return params, Batch(*rows, full(target, np.float32), full(valid, bool))


# ((loss, metrics), gradient), compiled once for every shape.
loss_and_gradient = jax.jit(jax.value_and_grad(ppo_loss, has_aux=True), static_argnums=1)


def loss_of(params_and_batch, clip_coef=0.2, vf_coef=0.0, ent_coef=0.0):
    params, batch = params_and_batch
    return loss_and_gradient(params, table, batch, clip_coef, vf_coef, ent_coef)[0]


def gradient_of(params_and_batch, clip_coef=0.2, vf_coef=0.0, ent_coef=0.0):
    params, batch = params_and_batch
    return loss_and_gradient(params, table, batch, clip_coef, vf_coef, ent_coef)[1]


def random_batch(seed, rows=24, actions=3, features=4):
    rng = np.random.default_rng(seed)
    params = {"policy": rng.normal(size=(features, actions)), "value": rng.normal(size=features)}
    obs, action = rng.normal(size=(rows, features)), rng.integers(actions, size=rows)
    logits = obs @ params["policy"]
    log_prob = logits[np.arange(rows), action] - np.log(np.exp(logits).sum(-1)) + 0.3 * rng.normal(size=rows)
    batch = Batch(obs, action, log_prob, 5 + 3 * rng.normal(size=rows), rng.normal(size=rows), rng.random(rows) < 0.7)
    return params, batch


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tree)


def numpy_loss_and_gradient(params, batch, clip_coef, vf_coef, ent_coef):
    """The loss of `linear` in float64, and its gradient by hand, from the valid rows alone."""
    obs, action, old, advantage, target = (np.asarray(x)[batch.valid] for x in batch[:5])
    rows = np.arange(len(obs))
    logits, value = obs @ params["policy"], obs @ params["value"]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = probs[rows, action] / np.exp(old)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)
    entropy = -(probs * np.log(probs)).sum(-1)
    loss = -surrogate.mean() + vf_coef * ((value - target) ** 2).mean() - ent_coef * entropy.mean()
    # d log p(a) / d logits = onehot(a) - probs; a clipped row has no gradient. d entropy = -p (log p + entropy).
    active = np.where(advantage > 0, ratio < 1 + clip_coef, ratio > 1 - clip_coef)
    d_logits = -(advantage * ratio * active)[:, None] * (np.eye(logits.shape[1])[action] - probs)
    d_logits += ent_coef * probs * (np.log(probs) + entropy[:, None])
    d_value = 2 * vf_coef * (value - target)
    return loss, {"policy": obs.T @ d_logits / len(obs), "value": obs.T @ d_value / len(obs)}


COEFFICIENTS = [(0.2, 0.5, 0.01), (0.1, 0.0, 0.0), (0.3, 2.0, 0.5)]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_loss_and_gradient_equal_numpy(coefficients):
    params, batch = random_batch(1)
    (loss, _), gradient = loss_and_gradient(as_float32(params), linear, as_float32(batch), *coefficients)
    expected_loss, expected = numpy_loss_and_gradient(params, batch, *coefficients)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-4)
    for name in expected:
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-3, atol=1e-5)


def test_unchanged_policy_has_ratio_1():
    _, metrics = loss_of(batch_with([0.0] * 4, [1.0, 2.0, 3.0, 7.0]))
    assert metrics["approx_kl"] == 0.0
    assert metrics["clip_fraction"] == 0.0
    assert float(metrics["policy_loss"]) == pytest.approx(0.0, abs=1e-6)  # the mean of normalised advantages


def test_metrics_are_scalars_of_the_known_names():
    _, metrics = loss_of(batch_with([0.0, 0.1], [1.0, 2.0]))
    assert set(metrics) == {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    assert all(x.shape == () for x in metrics.values())


def test_loss_is_the_weighted_sum_of_its_parts():
    loss, metrics = loss_of(batch_with([0.1, -0.3], [1.0, -1.0], value=2.0), vf_coef=0.5, ent_coef=0.25)
    parts = metrics["policy_loss"] + 0.5 * metrics["value_loss"] - 0.25 * metrics["entropy"]
    assert float(loss) == pytest.approx(float(parts))


# Advantages of +1 and -1 have mean 0 and deviation 1, so normalising leaves them as they are.
@pytest.mark.parametrize("ratio, positive, negative", [(1.5, 1.2, -1.5), (0.5, 0.5, -0.8), (1.1, 1.1, -1.1)])
def test_surrogate_is_clipped_on_the_side_that_pays(ratio, positive, negative):
    _, metrics = loss_of(batch_with([math.log(ratio)] * 2, [1.0, -1.0]))
    assert float(metrics["policy_loss"]) == pytest.approx(-(positive + negative) / 2, rel=1e-5)


@pytest.mark.parametrize("ratio, moves", [(1.5, [False, True]), (0.5, [True, False]), (1.1, [True, True])])
def test_a_clipped_row_has_no_gradient(ratio, moves):
    gradient = gradient_of(batch_with([math.log(ratio)] * 2, [1.0, -1.0]))
    assert (np.abs(gradient["logits"]).sum(-1) > 0).tolist() == moves


def test_clip_coef_is_used():
    _, metrics = loss_of(batch_with([math.log(1.5)] * 2, [1.0, -1.0]), clip_coef=0.4)
    assert float(metrics["policy_loss"]) == pytest.approx(-(1.4 - 1.5) / 2, rel=1e-5)
    assert metrics["clip_fraction"] == 1.0


def test_advantages_are_normalised():
    small, _ = loss_of(batch_with([0.1, -0.1, 0.0], [0.1, 0.2, 0.6]))
    large, _ = loss_of(batch_with([0.1, -0.1, 0.0], [51.0, 52.0, 56.0]))
    assert float(small) == pytest.approx(float(large), rel=1e-3)


def test_normalised_advantages_have_deviation_1():
    loss, _ = loss_of(batch_with([math.log(1.1), 0.0], [3.0, 7.0]))  # becomes -1 and 1
    assert float(loss) == pytest.approx((1.1 - 1.0) / 2, rel=1e-4)


def normalised(advantage, valid):
    """The advantages that ppo_loss works with: the gradient of row i's logits is -a[i] / (2 * rows) * (1, -1)."""
    gradient = gradient_of(batch_with(np.zeros(len(advantage)), advantage, valid=valid))
    return -2 * valid.sum() * np.asarray(gradient["logits"], np.float64)[:, 0]


@pytest.mark.parametrize("rows", [2, 768, 1024])
@pytest.mark.parametrize("masked", [False, True])
def test_equal_advantages_do_not_push(rows, masked):
    # The mean of 1,024 times 0.1 is rounded: without care, all that is left is that error, as one deviation.
    valid = np.arange(rows) % 3 > 0 if masked else np.ones(rows, bool)
    for size in (0.1, 3.3, -0.7, 1e-20, 1e-9, 1.1e-6, 0.01, 12.3, 777.7, 1.3e5, -3.3e7, 1.7e12, 3e30):
        advantage = np.where(valid, size, 5.0 * size)
        assert np.abs(normalised(advantage, valid)).max() < 1e-3, size


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (0.01, 0.003), (100.0, -30.0), (3e4, 1e4), (1.0, 1.0)])
def test_ordinary_advantages_are_normalised_exactly(scale, offset):
    rng = np.random.default_rng(0)
    advantage, valid = np.float32(offset + scale * rng.normal(size=1024)), rng.random(1024) < 0.8
    seen = np.float64(advantage)[valid]
    expected = (seen - seen.mean()) / (seen.std() + 1e-8)
    np.testing.assert_allclose(normalised(advantage, valid)[valid], expected, rtol=1e-6, atol=1e-6)


def test_one_row_has_an_advantage_of_0_not_nan():
    # DLR-RM/stable-baselines3#325
    params_and_batch = batch_with([0.1], [3.0])
    assert loss_of(params_and_batch)[0] == 0.0
    assert all(np.isfinite(x).all() for x in gradient_of(params_and_batch, 0.2, 0.5, 0.1).values())


@pytest.mark.parametrize("log_ratio", [-200.0, -100.0, -25.0, 25.0, 88.0, 100.0, 200.0])
@pytest.mark.parametrize("advantage", [[1.0, -1.0], [-1.0, 1.0], [0.0, 0.0]])
def test_far_ratios_give_finite_loss_and_gradient(log_ratio, advantage):
    # radixark/miles PR#1363: exp overflows in the branch that min does not take, and inf * 0 is NaN.
    params_and_batch = batch_with([log_ratio, 0.0], advantage)
    loss, metrics = loss_of(params_and_batch)
    assert all(np.isfinite(x) for x in (loss, *metrics.values()))
    assert np.isfinite(gradient_of(params_and_batch)["logits"]).all()


def test_a_huge_ratio_is_clipped_like_any_other():
    loss, _ = loss_of(batch_with([100.0, 0.0], [1.0, -1.0]))
    assert float(loss) == pytest.approx(-(1.2 - 1.0) / 2, rel=1e-5)


def test_ratios_up_to_exp_19_are_exact():
    # ray-project/ray#37334: the loss is unbounded for a negative advantage; that is the objective of PPO.
    loss, _ = loss_of(batch_with([19.0, 0.0], [-1.0, 1.0]))
    assert float(loss) == pytest.approx((math.exp(19.0) - 1.0) / 2, rel=1e-4)


def test_value_loss_is_the_mean_squared_error():
    _, metrics = loss_of(batch_with([0.0, 0.0], 1.0, value=[1.0, 2.0], target=[2.0, 4.0]))
    assert metrics["value_loss"] == 2.5


def test_right_values_have_no_loss():
    # RLinf/RLinf#1568: [B, 1] values against [B] targets would give .25.
    _, metrics = loss_of(batch_with([0.0, 0.0], 1.0, value=[1.0, 2.0], target=[1.0, 2.0]))
    assert metrics["value_loss"] == 0.0


def test_vf_coef_weights_the_value_loss():
    params_and_batch = batch_with([0.0, 0.0], 1.0, value=[1.0, 2.0], target=[2.0, 4.0])
    difference = loss_of(params_and_batch, vf_coef=3.0)[0] - loss_of(params_and_batch)[0]
    assert float(difference) == pytest.approx(3.0 * 2.5)


def test_entropy_of_equal_logits_is_log_2():
    assert float(loss_of(batch_with([0.0], 1.0))[1]["entropy"]) == pytest.approx(math.log(2))


def test_entropy_bonus_lowers_the_loss():
    params_and_batch = batch_with([0.0], 1.0)
    difference = loss_of(params_and_batch, ent_coef=0.1)[0] - loss_of(params_and_batch)[0]
    assert float(difference) == pytest.approx(-0.1 * math.log(2))


def test_entropy_bonus_pushes_towards_equal_logits():
    params, batch = batch_with([0.0], 0.0)
    params["logits"] = jnp.float32([[1.0, 0.0]])
    gradient = gradient_of((params, batch), ent_coef=1.0)["logits"]
    assert gradient[0, 0] > 0 > gradient[0, 1]  # descent lowers the larger logit


@pytest.mark.parametrize("action", [0, 2])  # 2 is the action that cannot happen
def test_a_logit_of_minus_infinity_is_harmless(action):
    params, batch = batch_with([0.0, 0.0], [1.0, -1.0])
    params["logits"] = jnp.float32([[0.0, 0.0, -jnp.inf]] * 2)
    batch = batch._replace(action=jnp.int32([action, 0]))
    loss, metrics = loss_of((params, batch), ent_coef=0.1)
    assert np.isfinite(loss)
    assert float(metrics["entropy"]) == pytest.approx(math.log(2))
    assert np.isfinite(gradient_of((params, batch), ent_coef=0.1)["logits"]).all()


def test_approx_kl_is_k3():
    # openai/spinningup#137: mean(-log ratio) is 0 here and can be negative. http://joschu.net/blog/kl-approx.html
    _, metrics = loss_of(batch_with([0.1, -0.1], 1.0))
    assert float(metrics["approx_kl"]) == pytest.approx(0.005004, rel=1e-3)


@pytest.mark.parametrize("log_ratio", [0.5, -0.5])
def test_approx_kl_is_positive_whichever_way_the_policy_moved(log_ratio):
    _, metrics = loss_of(batch_with([log_ratio], 1.0))
    assert float(metrics["approx_kl"]) == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, rel=1e-4)


@pytest.mark.parametrize("ratios, fraction", [
    ((1.3, 0.9, 0.7, 1.0), 0.5), ((1.3, 1, 1, 1), 0.25), ((0.7, 1, 1, 1), 0.25),
])  # fmt: skip
def test_clip_fraction_counts_both_sides(ratios, fraction):
    # pytorch/rl PR#2021
    _, metrics = loss_of(batch_with(np.log(ratios), 1.0))
    assert metrics["clip_fraction"] == fraction


@pytest.mark.parametrize("field, value", [
    ("obs", 50.0), ("action", 1), ("log_prob", -1e4), ("log_prob", 30.0), ("advantage", 1e6), ("target", -1e6),
])  # fmt: skip
def test_reset_rows_change_nothing(field, value):
    # vwxyzjn/cleanrl#562
    params, batch = as_float32(random_batch(2))
    changed = np.array(getattr(batch, field))
    changed[~batch.valid] = value
    before = loss_and_gradient(params, linear, batch, 0.2, 0.5, 0.01)
    after = loss_and_gradient(params, linear, batch._replace(**{field: jnp.asarray(changed)}), 0.2, 0.5, 0.01)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_reset_rows_count_as_if_they_were_not_there():
    params, batch = as_float32(random_batch(3))
    (with_them, metrics), _ = loss_and_gradient(params, linear, batch, 0.2, 0.5, 0.01)
    batch = jax.tree.map(lambda x: np.asarray(x)[batch.valid], batch)
    (without, other_metrics), _ = loss_and_gradient(params, linear, batch, 0.2, 0.5, 0.01)
    assert float(with_them) == pytest.approx(float(without), rel=1e-4)
    for name in metrics:
        assert float(metrics[name]) == pytest.approx(float(other_metrics[name]), rel=1e-4, abs=1e-6), name


def test_only_reset_rows_give_loss_0():
    params_and_batch = batch_with([0.5, 0.5], [1.0, -1.0], value=1.0, valid=False)
    assert loss_of(params_and_batch, vf_coef=0.5, ent_coef=0.1)[0] == 0.0
    for gradient in gradient_of(params_and_batch, vf_coef=0.5, ent_coef=0.1).values():
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("values, returns, expected", [
    ([1, 2, 3], [1, 2, 3], 1.0), ([2, 2, 2], [1, 2, 3], 0.0),
    ([3, 2, 1], [1, 2, 3], -3.0), ([5, 6, 7], [1, 2, 3], 1.0),
])  # fmt: skip
def test_explained_variance(values, returns, expected):
    result = explained_variance(jnp.float32(values), jnp.float32(returns), jnp.ones(3, bool))
    assert float(result) == pytest.approx(expected)


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, 33.3])
def test_explained_variance_of_equal_returns_is_0(constant):
    # DLR-RM/stable-baselines3 PR#1942: not inf or NaN, and no huge number made of rounding errors.
    assert explained_variance(jnp.arange(7.0), jnp.full(7, constant), jnp.ones(7, bool)) == 0.0


def test_explained_variance_ignores_reset_rows():
    valid = jnp.array([True, True, False, True])
    assert explained_variance(jnp.float32([1, 2, 9, 3]), jnp.float32([1, 2, -9, 3]), valid) == 1.0


def test_policy_samples_in_proportion_and_its_mode_is_the_likeliest_action():
    policy = Categorical(jnp.log(jnp.tile(jnp.float32([0.2, 0.7, 0.1]), (5000, 1))))
    actions = policy.sample(jax.random.key(0))
    np.testing.assert_allclose(np.bincount(actions, minlength=3) / 5000, [0.2, 0.7, 0.1], atol=0.03)
    assert (policy.mode() == 1).all()
    assert actions.dtype == policy.mode().dtype == jnp.int32


def test_policy_knows_log_probabilities_and_entropy():
    policy = Categorical(jnp.log(jnp.float32([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])) + 3.0)
    np.testing.assert_allclose(policy.log_prob(jnp.int32([2, 1])), np.log([0.25, 0.8]), rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), [1.5 * math.log(2), 0.63903], rtol=1e-4)


INPUTS = {"cartpole": np.zeros((5, 4)), "flappy": np.zeros((5, 84, 84, 4), np.uint8)}
INPUTS["atari"] = INPUTS["flappy"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_networks_give_logits_and_values_and_start_orthogonal(name):
    # https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, detail 2
    with jax.numpy_rank_promotion("allow"):  # a Dense layer adds its bias by broadcasting
        init = jax.jit(SCRIPTS[name].ActorCritic(num_actions=3).init_with_output)
        (logits, value), params = init(jax.random.key(0), INPUTS[name])
    assert (logits.shape, value.shape) == ((5, 3), (5,))
    assert logits.dtype == value.dtype == jnp.float32
    outputs = []
    for x in map(np.asarray, jax.tree.leaves(params)):
        if x.ndim > 1:
            outputs.append(x.shape[-1])
            gain = {1: 1.0, 3: 0.01}.get(x.shape[-1], math.sqrt(2))  # value, policy, hidden
            x = x.reshape(-1, x.shape[-1])
            gram = x.T @ x if len(x) > len(x.T) else x @ x.T  # of orthogonal columns or rows
            np.testing.assert_allclose(gram / gain**2, np.eye(len(gram)), atol=2e-4)
        else:
            assert not x.any()
    assert outputs.count(1) == outputs.count(3) == 1
