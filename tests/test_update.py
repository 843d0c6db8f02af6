"""update and act: which rows, how often, with which rates; against a NumPy Adam and the definition of advantages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    SCRIPTS,
    actor,
    assert_same,
    gae_by_definition,
    initial_state,
    linear,
    only_cartpole,
    random_rollout,
    tiny,
    updater,
)

import ppo_cartpole as ppo

SETTINGS = dict(num_envs=3, num_steps=8, num_minibatches=4, update_epochs=3, total_frames=72, gamma=0.9)
SETTINGS |= dict(gae_lambda=0.7, reward_scale=0.25, clip_coef=0.3, vf_coef=0.4, ent_coef=0.04)
_watched = {}


@pytest.fixture(params=["cartpole", "atari"])
def script(request):
    """The scripts with an update of their own; test_project and test_atari say how Flappy Bird's is CartPole's."""
    return SCRIPTS[request.param]


@pytest.fixture
def watched(script, monkeypatch):
    """What ppo_loss got and gave in all minibatches of three updates: a list of (Batch, coefficients, metrics)."""
    if script not in _watched:
        config, seen, loss = script.Config(**SETTINGS), [], script.ppo_loss

        def note(params, apply_fn, batch, *coefficients):
            value, metrics = loss(params, apply_fn, batch, *coefficients)
            keep = partial(jax.tree.map, np.array)
            jax.debug.callback(lambda *args: seen.append(keep(args)), batch, coefficients, metrics, ordered=True)
            return value, metrics

        monkeypatch.setattr(script, "ppo_loss", note)
        run_update = jax.jit(partial(script.update, config, linear, script.make_optimizer(config)))
        state, reported = initial_state(script, config), []
        for _ in range(3):
            state, metrics = run_update(state, *random_rollout(script, config))
            reported.append(jax.device_get(metrics))
        jax.effects_barrier()
        _watched[script] = seen, reported
    return _watched[script]


def epochs_of(seen):
    """The row numbers in the order of use: one list for each epoch."""
    return np.concatenate([batch.obs[:, 0] for batch, *_ in seen]).reshape(-1, 24).astype(int).tolist()


def test_every_row_is_used_once_in_every_epoch(watched):
    assert [len(batch.obs) for batch, *_ in watched[0]] == [6] * 4 * 3 * 3
    for epoch in epochs_of(watched[0]):
        assert sorted(epoch) == list(range(24))


def test_every_epoch_and_update_has_an_order_of_its_own(watched):
    epochs = epochs_of(watched[0])
    assert len({tuple(epoch) for epoch in epochs}) == 9
    assert list(range(24)) not in epochs


def definition(script):
    """(Rollout, advantages by definition) of the watched updates, the second of the first one alone."""
    config = script.Config(**SETTINGS)
    rollout, next_obs = random_rollout(script, config)
    next_value = next_obs @ np.asarray(initial_state(script, config).params["value"])
    flags = rollout.terminated, rollout.done
    return rollout, gae_by_definition(0.25 * rollout.reward, rollout.value, next_value, *flags, 0.9, 0.7)


def test_minibatches_are_rows_of_the_rollout_with_the_advantages_and_targets_of_the_definition(script, watched):
    rollout, advantages = definition(script)
    for batch, *_ in watched[0][:12]:
        rows = np.unravel_index(batch.obs[:, 0].astype(int), rollout.action.shape)
        for name in ("obs", "action", "log_prob", "valid"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(rollout, name)[rows])
        np.testing.assert_allclose(batch.advantage, advantages[rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.target, (advantages + rollout.value)[rows], rtol=1e-4, atol=1e-5)


def test_clip_range_falls_once_per_update_and_the_weights_do_not(watched):
    coefficients = np.array([coefficients for _, coefficients, _ in watched[0]])
    np.testing.assert_allclose(coefficients[:, 0], np.repeat([0.3, 0.2, 0.1], 12), rtol=1e-6)
    np.testing.assert_allclose(coefficients[:, 1:], [[0.4, 0.04]] * 36, rtol=1e-6)


def test_metrics_are_means_over_all_minibatches_under_their_names_in_the_file(watched):
    seen, reported = watched
    for number, metrics in enumerate(reported):
        of_update = [metrics for *_, metrics in seen[12 * number : 12 * (number + 1)]]
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
            mean = np.mean([metrics[name] for metrics in of_update])
            assert float(metrics[f"losses/{name}"]) == pytest.approx(mean, rel=1e-4, abs=1e-6)
    rates = {"charts/learning_rate", "charts/clip_coef", "finite"}
    assert set(metrics) == {f"losses/{name}" for name in (*of_update[0], "explained_variance")} | rates
    assert all(x.shape == () for x in metrics.values())


def test_explained_variance_is_of_the_values_that_the_rollout_had(script, watched):
    rollout, advantages = definition(script)
    returns, values = (advantages + rollout.value)[rollout.valid], rollout.value[rollout.valid]
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert float(watched[1][0]["losses/explained_variance"]) == pytest.approx(expected, rel=1e-4)


loss_gradient = jax.jit(jax.grad(ppo.ppo_loss, has_aux=True), static_argnums=1)


# The second norm is small enough for Adam's eps to matter.
@pytest.mark.parametrize("max_grad_norm, anneal", [(0.5, True), (1e-4, False)])
def test_parameters_equal_numpy_adam(script, max_grad_norm, anneal):
    # Kingma and Ba 2015, algorithm 1, with eps 1e-5, after clipping by the global norm; state lives on.
    settings = dict(max_grad_norm=max_grad_norm, anneal=anneal, learning_rate=0.1, num_minibatches=1)
    settings |= dict(clip_coef=0.2, vf_coef=0.5, ent_coef=0.01, reward_scale=1.0)
    config = tiny(script, **settings, total_frames=24, update_epochs=2)
    run_update, state = updater(script, config), initial_state(script, config)
    expected = jax.tree.map(np.float64, state.params)
    mean = {name: np.zeros_like(x) for name, x in expected.items()}
    square, count = {name: np.zeros_like(x) for name, x in expected.items()}, 0
    for number in range(3):
        rollout, next_obs = random_rollout(script, config, seed=number + 1)
        fraction = 1 - number / 3 if anneal else 1.0
        advantages = gae_by_definition(
            rollout.reward, rollout.value, next_obs @ expected["value"], rollout.terminated, rollout.done,
            config.gamma, config.gae_lambda,
        )  # fmt: skip
        rows = ppo.Batch(*rollout[:3], np.float32(advantages), np.float32(advantages + rollout.value), rollout.valid)
        rows = jax.tree.map(lambda x: jnp.asarray(x.reshape(8, *x.shape[2:])), rows)
        for _ in range(2):
            params = jax.tree.map(jnp.float32, expected)
            gradient = loss_gradient(params, linear, rows, 0.2 * fraction, 0.5, 0.01)[0]
            gradient = jax.tree.map(np.float64, gradient)
            norm = np.sqrt(sum((x**2).sum() for x in gradient.values()))
            count += 1
            for name in expected:
                clipped = gradient[name] * min(1.0, max_grad_norm / norm)
                mean[name] = 0.9 * mean[name] + 0.1 * clipped
                square[name] = 0.999 * square[name] + 0.001 * clipped**2
                step = mean[name] / (1 - 0.9**count) / (np.sqrt(square[name] / (1 - 0.999**count)) + 1e-5)
                expected[name] = expected[name] - 0.1 * fraction * step
        state, metrics = run_update(state, rollout, next_obs)
        reported = [float(metrics[f"charts/{name}"]) for name in ("learning_rate", "clip_coef")]
        assert reported == pytest.approx([0.1 * fraction, 0.2 * fraction])
        for name in expected:
            np.testing.assert_allclose(state.params[name], expected[name], rtol=2e-3, atol=2e-4)


def learning_rates(script, steps, **settings):
    """What the optimizer subtracts from a parameter whose gradient is always the same: Adam's learning rate."""
    optimizer, gradient, rates = script.make_optimizer(tiny(script, **settings)), jnp.float32(0.3), []
    state, update = optimizer.init(gradient), jax.jit(optimizer.update)
    for _ in range(steps):
        step, state = update(gradient, state)
        rates.append(-float(step))
    return rates


@pytest.mark.parametrize("settings, expected", [
    # luchris429/purejaxrl#6: the optimizer counts minibatches. rlevo#324: the last update is not lost.
    # facebookresearch/minimax PR#10: past the end the rate is 0, not negative.
    (dict(total_frames=32, learning_rate=1.0), 4 * [1.0] + 4 * [0.75] + 4 * [0.5] + 4 * [0.25] + 6 * [0.0]),
    (dict(total_frames=8, learning_rate=1.0), 4 * [1.0]),
    (dict(total_frames=16, learning_rate=0.5, anneal=False), 12 * [0.5]),
])  # fmt: skip
def test_learning_rate_falls_once_per_update_down_to_0(script, settings, expected):
    np.testing.assert_allclose(learning_rates(script, len(expected), **settings), expected, rtol=1e-3)


def test_every_update_counts_takes_a_new_key_and_reports_the_rates_that_it_used(script):
    # google-deepmind/optax#415: read from another counter, they are one update off.
    config = tiny(script)
    run_update, state, reported = updater(script, config), initial_state(script, config), []
    for number in range(6):
        before, (state, metrics) = state, run_update(state, *random_rollout(script, config))
        assert int(state.update) == number + 1 and state.update.dtype == jnp.int32
        assert not jnp.array_equal(jax.random.key_data(state.key), jax.random.key_data(before.key))
        reported.append((float(metrics["charts/learning_rate"]), float(metrics["charts/clip_coef"])))
    expected = np.outer(1 - np.arange(6) / 6, [config.learning_rate, config.clip_coef])
    np.testing.assert_allclose(reported, expected, rtol=1e-5)


def test_reset_rows_after_a_termination_change_nothing(script):
    # vwxyzjn/cleanrl#562
    config = tiny(script)
    rollout, next_obs = random_rollout(script, config)
    rollout = rollout._replace(terminated=rollout.done)
    run_update, state = updater(script, config), initial_state(script, config)
    expected = run_update(state, rollout, next_obs)
    for field in ("obs", "action", "log_prob", "reward", "value"):
        changed = np.array(getattr(rollout, field))
        changed[~rollout.valid] = 1 - changed[~rollout.valid] if field == "action" else 50.0
        assert (changed != getattr(rollout, field)).any()
        assert_same(run_update(state, rollout._replace(**{field: changed}), next_obs), expected)


@pytest.mark.parametrize("field", ["reward", "value", "obs"])
def test_numbers_that_are_not_finite_are_reported(script, field):
    config = tiny(script)
    rollout, next_obs = random_rollout(script, config)
    rollout = rollout._replace(valid=np.ones_like(rollout.valid))
    run_update, state = updater(script, config), initial_state(script, config)
    assert run_update(state, rollout, next_obs)[1]["finite"]
    for bad in (np.nan, np.inf):
        changed = np.array(getattr(rollout, field))
        changed[2] = bad
        assert not run_update(state, rollout._replace(**{field: changed}), next_obs)[1]["finite"]


def test_parameters_that_are_not_finite_are_reported(script):
    # One that no row has to do with, so the losses are finite.
    config, state = tiny(script), initial_state(script, tiny(script))
    state = state._replace(params=state.params | {"unused": jnp.float32(np.inf)})
    _, metrics = updater(script, config)(state, *random_rollout(script, config))
    assert np.isfinite(metrics["losses/policy_loss"] + metrics["losses/value_loss"])
    assert not metrics["finite"]


def test_first_minibatch_of_a_real_rollout_has_ratio_1():
    # The log-probabilities are those of the actions taken.
    network, obs = ppo.ActorCritic(2), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(network.init)(jax.random.key(0), obs))  # far from uniform
    (action, log_prob, value), _ = actor(network.apply)(params, jax.random.key(1), obs)
    assert (action.dtype, log_prob.dtype, value.dtype) == (np.int32, np.float32, np.float32)
    assert len(set(action.tolist())) == 2 and not np.allclose(log_prob, log_prob[0])
    batch = ppo.Batch(obs, action, log_prob, np.ones(8, np.float32), value, np.ones(8, bool))
    _, metrics = jax.jit(ppo.ppo_loss, static_argnums=1)(params, network.apply, batch, 0.2, 0.5, 0.01)
    assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0 and float(metrics["value_loss"]) == pytest.approx(0.0, abs=1e-6)


@only_cartpole
def test_one_row_per_update_stays_finite(script):
    # DLR-RM/stable-baselines3#265
    config = tiny(script, num_envs=1, num_steps=1, num_minibatches=1, total_frames=3)
    run_update, state = updater(script, config), initial_state(script, config)
    for number in range(3):
        state, metrics = run_update(state, *random_rollout(script, config, seed=number + 1))
        assert metrics["finite"]


def test_no_key_is_used_twice(script):
    # dunnolab/xland-minigrid#42. Traced as one function: JAX does not follow a used key out of a compiled one.
    config = tiny(script, num_steps=2, num_minibatches=1)
    optimizer = script.make_optimizer(config)

    def two_updates(seed, rollout, next_obs):
        params = initial_state(script, config).params
        state = script.init_state(ppo.ActorCritic(2), optimizer, next_obs, seed)._replace(params=params)
        for _ in range(2):
            for obs in rollout.obs:
                _, key = script.act(linear, state.params, state.key, obs)
                state = state._replace(key=key, opt_state=optimizer.init(params))
            state, _ = script.update(config, linear, optimizer, state, rollout, next_obs)
        return state

    with jax.debug_key_reuse(True):
        jax.jit(two_updates).trace(1, *random_rollout(script, config))


def test_act_draws_anew_with_the_next_key():
    obs, key = np.ones((1000, 3), np.float32), jax.random.key(0)
    params = {"policy": jnp.log(jnp.float32([[1, 9], [1, 1], [1, 1]])), "value": jnp.float32([1, 2, 3])}
    (action, log_prob, value), after = actor(linear)(params, key, obs)
    (again, *_), _ = actor(linear)(params, after, obs)
    assert 0.86 < action.mean() < 0.94
    assert (action != again).any()
    np.testing.assert_allclose(log_prob, np.log([0.1, 0.9])[np.asarray(action)], rtol=1e-5)
    np.testing.assert_array_equal(value, 6.0)


@only_cartpole
def test_seeds_give_different_parameters_and_keys(script):
    optimizer = script.make_optimizer(tiny())
    start = jax.jit(partial(script.init_state, script.ActorCritic(2), optimizer, np.zeros((1, 3))))
    one, two = start(1), start(2)
    for leaf, other in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params)):
        assert leaf.ndim == 1 or not np.array_equal(leaf, other)  # biases are 0
    assert not np.array_equal(jax.random.key_data(one.key), jax.random.key_data(two.key))
    assert_same(one, start(1))
