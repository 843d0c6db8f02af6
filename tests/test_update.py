"""update: which rows, how often, with which rates; against a NumPy Adam and the definition of the advantages."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same, gae_by_definition, initial_state, linear, random_rollout, tiny

import ppo_cartpole as ppo


@cache
def updater(config, apply_fn=linear):
    return jax.jit(partial(ppo.update, config, apply_fn, ppo.make_optimizer(config)))


@pytest.fixture
def watched(monkeypatch):
    """watched(config, updates=1) runs updates and returns the arguments of ppo_loss in all minibatches."""

    def run(config, updates=1):
        seen, loss = [], ppo.ppo_loss

        def note(params, apply_fn, batch, *coefficients):
            seen.append((jax.tree.map(np.array, batch), [float(x) for x in coefficients]))
            return loss(params, apply_fn, batch, *coefficients)

        monkeypatch.setattr(ppo, "ppo_loss", note)
        state = initial_state(config)
        with jax.disable_jit():  # a scan is a loop then, and the arguments are numbers
            for _ in range(updates):
                state, _ = ppo.update(config, linear, ppo.make_optimizer(config), state, *random_rollout(config))
        return seen

    return run


def orders(seen, config):
    """The row numbers in the order of use: one list for each epoch."""
    rows = np.concatenate([batch.obs[:, 0] for batch, _ in seen])
    return rows.reshape(-1, config.batch_size).astype(int).tolist()


def test_every_row_is_used_once_in_every_epoch(watched):
    config = tiny(num_minibatches=4, update_epochs=3)
    seen = watched(config)
    assert len(seen) == 12
    for epoch in orders(seen, config):
        assert sorted(epoch) == list(range(config.batch_size))


def test_every_epoch_and_update_has_an_order_of_its_own(watched):
    config = tiny(num_minibatches=1, update_epochs=3)
    epochs = orders(watched(config, updates=2), config)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert list(range(config.batch_size)) not in epochs


def test_rows_stay_together(watched):
    config = tiny()
    rollout, _ = random_rollout(config)
    for batch, _ in watched(config):
        rows = np.unravel_index(batch.obs[:, 0].astype(int), rollout.action.shape)
        for name in ("obs", "action", "log_prob", "valid"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(rollout, name)[rows])


@pytest.mark.parametrize("gamma, gae_lambda", [(0.9, 0.7), (0.5, 0.9)])
def test_advantages_and_targets_follow_the_definition(watched, gamma, gae_lambda):
    config = tiny(gamma=gamma, gae_lambda=gae_lambda, num_steps=8)
    rollout, next_obs = random_rollout(config)
    next_value = next_obs @ np.asarray(initial_state(config).params["value"])
    flags = rollout.terminated, rollout.done
    advantages = gae_by_definition(rollout.reward, rollout.value, next_value, *flags, gamma, gae_lambda)
    for batch, _ in watched(config):
        rows = np.unravel_index(batch.obs[:, 0].astype(int), rollout.action.shape)
        np.testing.assert_allclose(batch.advantage, advantages[rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.target, (advantages + rollout.value)[rows], rtol=1e-4, atol=1e-5)


def test_clip_range_falls_once_per_update_and_the_weights_do_not(watched):
    config = tiny(total_frames=32, clip_coef=0.2, vf_coef=0.3, ent_coef=0.04)
    coefficients = np.array([coefficients for _, coefficients in watched(config, updates=4)])
    np.testing.assert_allclose(coefficients[:, 0], np.repeat([0.2, 0.15, 0.1, 0.05], 4), rtol=1e-6)
    np.testing.assert_allclose(coefficients[:, 1:], [[0.3, 0.04]] * 16, rtol=1e-6)


def test_no_anneal_keeps_the_clip_range(watched):
    config = tiny(total_frames=16, anneal=False)
    assert [coefficients[0] for _, coefficients in watched(config, updates=2)] == pytest.approx([0.2] * 8)


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e-4])  # the second is small enough for Adam's eps to matter
@pytest.mark.parametrize("anneal", [True, False])
def test_parameters_equal_numpy_adam(max_grad_norm, anneal):
    # Kingma and Ba 2015, algorithm 1, with eps 1e-5, after clipping by the global norm; state lives on.
    settings = dict(max_grad_norm=max_grad_norm, anneal=anneal, learning_rate=0.1, num_minibatches=1)
    config = tiny(**settings, total_frames=24, update_epochs=2, ent_coef=0.01)
    run_update, state = updater(config), initial_state(config)
    expected = jax.tree.map(np.float64, state.params)
    mean = {name: np.zeros_like(x) for name, x in expected.items()}
    square, count = {name: np.zeros_like(x) for name, x in expected.items()}, 0
    for number in range(3):
        rollout, next_obs = random_rollout(config, seed=number)
        fraction = 1 - number / 3 if anneal else 1.0
        advantages = gae_by_definition(
            rollout.reward, rollout.value, next_obs @ expected["value"], rollout.terminated, rollout.done,
            config.gamma, config.gae_lambda,
        )  # fmt: skip
        rows = ppo.Batch(*rollout[:3], np.float32(advantages), np.float32(advantages + rollout.value), rollout.valid)
        rows = jax.tree.map(lambda x: jnp.asarray(x.reshape(8, *x.shape[2:])), rows)
        for _ in range(2):
            params = jax.tree.map(jnp.float32, expected)
            gradient = jax.grad(ppo.ppo_loss, has_aux=True)(params, linear, rows, 0.2 * fraction, 0.5, 0.01)[0]
            gradient = jax.tree.map(np.float64, gradient)
            norm = np.sqrt(sum((x**2).sum() for x in gradient.values()))
            count += 1
            for name in expected:
                clipped = gradient[name] * min(1.0, max_grad_norm / norm)
                mean[name] = 0.9 * mean[name] + 0.1 * clipped
                square[name] = 0.999 * square[name] + 0.001 * clipped**2
                step = mean[name] / (1 - 0.9**count) / (np.sqrt(square[name] / (1 - 0.999**count)) + 1e-5)
                expected[name] = expected[name] - 0.1 * fraction * step
        state, _ = run_update(state, rollout, next_obs)
        for name in expected:
            np.testing.assert_allclose(state.params[name], expected[name], rtol=2e-3, atol=2e-4)


def learning_rates(config, steps):
    """What the optimizer subtracts from a parameter whose gradient is always the same: Adam's learning rate."""
    optimizer, gradient, rates = ppo.make_optimizer(config), jnp.float32(0.3), []
    state = optimizer.init(gradient)
    for _ in range(steps):
        step, state = optimizer.update(gradient, state)
        rates.append(-float(step))
    return rates


def test_learning_rate_falls_once_per_update():
    # luchris429/purejaxrl#6: the optimizer counts minibatches. rlevo#324: the last update is not lost.
    config = tiny(total_frames=32, learning_rate=1.0)
    expected = np.repeat([1.0, 0.75, 0.5, 0.25], 4)
    np.testing.assert_allclose(learning_rates(config, 16), expected, rtol=1e-3)


def test_learning_rate_is_never_negative_past_the_end():
    # facebookresearch/minimax PR#10
    assert learning_rates(tiny(total_frames=16, learning_rate=1.0), 20)[8:] == [0.0] * 12


def test_no_anneal_keeps_the_learning_rate():
    config = tiny(total_frames=16, learning_rate=0.5, anneal=False)
    np.testing.assert_allclose(learning_rates(config, 12), [0.5] * 12, rtol=1e-3)


def test_a_run_of_one_update_uses_the_whole_learning_rate():
    np.testing.assert_allclose(learning_rates(tiny(total_frames=8, learning_rate=1.0), 4), [1.0] * 4, rtol=1e-3)


def test_reported_rates_are_those_used():
    # google-deepmind/optax#415: read from another counter, they are one update off.
    config = tiny(total_frames=32, learning_rate=0.1, clip_coef=0.2)
    run_update, state, reported = updater(config), initial_state(config), []
    for _ in range(4):
        state, metrics = run_update(state, *random_rollout(config))
        reported.append((float(metrics["learning_rate"]), float(metrics["clip_coef"])))
    np.testing.assert_allclose(reported, np.outer([1, 0.75, 0.5, 0.25], [0.1, 0.2]), rtol=1e-6)


def test_update_counts_and_takes_a_new_key():
    config = tiny()
    state = initial_state(config)
    after, _ = updater(config)(state, *random_rollout(config))
    assert int(after.update) == 1
    assert after.update.dtype == jnp.int32
    assert not jnp.array_equal(jax.random.key_data(after.key), jax.random.key_data(state.key))


@pytest.mark.parametrize("field", ["obs", "action", "log_prob", "reward", "value"])
def test_reset_rows_after_a_termination_change_nothing(field):
    # vwxyzjn/cleanrl#562
    config = tiny(num_steps=8)
    rollout, next_obs = random_rollout(config)
    rollout = rollout._replace(terminated=rollout.done)
    changed = np.array(getattr(rollout, field))
    changed[~rollout.valid] = 1 if field == "action" else 50.0
    assert (changed != getattr(rollout, field)).any()
    run_update, state = updater(config), initial_state(config)
    before, metrics = run_update(state, rollout, next_obs)
    after, other_metrics = run_update(state, rollout._replace(**{field: changed}), next_obs)
    assert_same(before, after)
    assert_same(metrics, other_metrics)


def test_metrics_are_means_over_all_minibatches():
    config = tiny(num_minibatches=2, update_epochs=1, learning_rate=1e-9)  # parameters stay, all but
    rollout, next_obs = random_rollout(config)
    rollout = rollout._replace(valid=np.ones_like(rollout.valid))  # so both halves weigh the same
    state = initial_state(config)
    _, metrics = updater(config)(state, rollout, next_obs)
    logits, _ = linear(state.params, rollout.obs.reshape(8, -1))
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    assert float(metrics["entropy"]) == pytest.approx(-(np.exp(log_probs) * log_probs).sum(-1).mean(), rel=1e-4)


def test_explained_variance_is_of_the_values_that_the_rollout_had():
    config = tiny(gamma=0.0)  # so the targets are the rewards
    rollout, next_obs = random_rollout(config)
    reward, value = rollout.reward[rollout.valid], rollout.value[rollout.valid]
    _, metrics = updater(config)(initial_state(config), rollout, next_obs)
    expected = 1 - np.var(reward - value) / np.var(reward)
    assert float(metrics["explained_variance"]) == pytest.approx(expected, rel=1e-4)


def test_first_minibatch_of_a_real_rollout_has_ratio_1():
    config = tiny(num_minibatches=1, update_epochs=1)
    network, optimizer = ppo.ActorCritic(2), ppo.make_optimizer(config)
    rollout, next_obs = random_rollout(config)
    state = ppo.init_state(network, optimizer, rollout.obs[0], 0)
    buffer = ppo.make_buffer(config, jax.ShapeDtypeStruct(next_obs.shape, next_obs.dtype))
    act = jax.jit(partial(ppo.act, network.apply))
    for t in range(config.num_steps):
        buffer, key, _ = act(state.params, buffer, jax.random.fold_in(state.key, t), rollout.obs[t], t)
    rollout = ppo.Rollout(*buffer, *rollout[4:])
    _, metrics = updater(config, network.apply)(state, rollout, next_obs)
    assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-7)
    assert float(metrics["clip_fraction"]) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["reward", "value", "obs"])
def test_numbers_that_are_not_finite_are_reported(field, bad):
    config = tiny()
    rollout, next_obs = random_rollout(config)
    rollout = rollout._replace(valid=np.ones_like(rollout.valid))
    run_update, state = updater(config), initial_state(config)
    assert run_update(state, rollout, next_obs)[1]["finite"]
    changed = np.array(getattr(rollout, field))
    changed[2] = bad
    assert not run_update(state, rollout._replace(**{field: changed}), next_obs)[1]["finite"]


def test_one_row_per_update_stays_finite():
    # DLR-RM/stable-baselines3#265
    config = tiny(num_envs=1, num_steps=1, num_minibatches=1, total_frames=3)
    run_update, state = updater(config), initial_state(config)
    for number in range(3):
        state, metrics = run_update(state, *random_rollout(config, seed=number))
        assert metrics["finite"]


def test_no_key_is_used_twice():
    # dunnolab/xland-minigrid#42. Not jitted: JAX does not follow a used key out of a jitted function.
    config = tiny(update_epochs=1, num_minibatches=1)
    with jax.debug_key_reuse(True):
        state = ppo.init_state(ppo.ActorCritic(2), ppo.make_optimizer(config), np.zeros((2, 3), np.float32), 0)
        state = initial_state(config)._replace(key=state.key)
        for number in range(2):
            rollout, next_obs = random_rollout(config, seed=number)
            buffer = ppo.make_buffer(config, jax.ShapeDtypeStruct(next_obs.shape, next_obs.dtype))
            for t in range(config.num_steps):
                buffer, key, _ = ppo.act(linear, state.params, buffer, state.key, rollout.obs[t], t)
                state = state._replace(key=key)
            rollout = jax.tree.map(jnp.asarray, ppo.Rollout(*buffer, *rollout[4:]))
            state, _ = ppo.update(config, linear, ppo.make_optimizer(config), state, rollout, next_obs)


def test_seeds_give_different_parameters_and_keys():
    def start(seed):
        return ppo.init_state(ppo.ActorCritic(2), ppo.make_optimizer(tiny()), np.zeros((1, 3), np.float32), seed)

    one, two = start(1), start(2)
    for leaf, other in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params)):
        assert leaf.ndim == 1 or not np.array_equal(leaf, other)  # biases are 0
    assert not np.array_equal(jax.random.key_data(one.key), jax.random.key_data(two.key))
    assert_same(one, start(1))
