"""Atari: what the learner sees of scripted and of real games, both networks on pictures, minibatches, whole runs."""

import json
from functools import partial

import ale_py
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from conftest import SmallNetwork, actor, die_in, initial_state, linear, random_rollout, read_metrics, tiny, updater

import ppo_atari as ppo
import ppo_cartpole
import ppo_flappy

only_atari = pytest.mark.parametrize("script", ["atari"], indirect=True)
RealNetwork = ppo.ActorCritic
NOOP, FIRE, UP = ale_py.Action.NOOP, ale_py.Action.FIRE, ale_py.Action.UP


class ScriptedGame(gym.vector.VectorEnv):
    """One game whose steps are given as (reward, terminated, truncated, lives left); NEXT_STEP, again and again."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    num_envs = 1
    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(3)
    observation_space = gym.vector.utils.batch_space(single_observation_space, 1)
    action_space = gym.vector.utils.batch_space(single_action_space, 1)

    def __init__(self, steps, lives):
        self.steps, self.start_lives, self.actions = steps, lives, []

    def row(self, reward=0, terminated=False, truncated=False, lives=None):
        obs = np.full((1, 4, 84, 84), self.next, np.uint8)
        info = {"lives": np.array([self.start_lives if lives is None else lives], np.int32)}
        return obs, np.array([reward]), np.array([terminated]), np.array([truncated]), info

    def reset(self, *, seed=None, options=None):
        self.next, self.over = 0, False
        obs, *_, info = self.row()
        return obs, info

    def step(self, actions):
        assert actions.dtype == np.int32 and actions.shape == (1,)
        self.actions.append(int(actions[0]))
        if self.over:
            self.next, self.over = 0, False
            return self.row()
        step = self.steps[self.next]
        self.next, self.over = self.next + 1, step[1] or step[2]
        return self.row(*step)


class SideBySide(gym.vector.VectorEnv):
    """Scripted games in one vector environment."""

    metadata = ScriptedGame.metadata
    single_observation_space = ScriptedGame.single_observation_space
    single_action_space = ScriptedGame.single_action_space

    def __init__(self, *games):
        self.games, self.num_envs = games, len(games)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed=None, options=None):
        obs, infos = zip(*(game.reset() for game in self.games))
        return np.concatenate(obs), {"lives": np.concatenate([info["lives"] for info in infos])}

    def step(self, actions):
        *rows, infos = zip(*(game.step(actions[i : i + 1]) for i, game in enumerate(self.games)))
        return *map(np.concatenate, rows), {"lives": np.concatenate([info["lives"] for info in infos])}


def scripted(steps, lives, actions=(NOOP, FIRE, UP)):
    """(AtariEnvs around a scripted game, the game)."""
    game = ScriptedGame(steps, lives)
    return ppo.AtariEnvs(gym.wrappers.vector.RecordEpisodeStatistics(game), list(actions)), game


def play(envs, action, count):
    """The (reward, terminated, truncated, decided, game_over) of `count` steps of one game."""
    envs.reset(seed=0)
    found = []
    for _ in range(count):
        _, reward, terminated, truncated, info = envs.step(np.array([action]))
        rows = (reward, terminated, truncated, info["decided"], info["game_over"])
        found.append(tuple(row[0].item() for row in rows))
    return found


def episodes_of(envs):
    """(return, length) of the games that have ended."""
    return list(zip(envs.env.return_queue, envs.env.length_queue))


# ------------------------------------------------------------------------------------- scripted games

TWO_LIVES = [
    (7, False, False, 2),
    (-3, False, False, 1),
    (1, False, False, 1),
    (0, False, False, 1),
    (4, True, False, 0),
]


def test_learner_sees_signs_and_lost_lives_while_whole_games_with_raw_rewards_are_reported():
    # openai/baselines PR#216, DLR-RM/stable-baselines3#591
    envs, game = scripted(TWO_LIVES, lives=2)
    envs.reset(seed=0)
    seen = []
    for _ in range(12):
        _, reward, terminated, truncated, info = envs.step(np.array([2]))
        seen.append((reward[0].item(), terminated[0].item(), truncated[0].item(), info["decided"][0].item()))
    game_rows = [
        (1, False, False, True),
        (-1, True, False, True),  # the life is lost
        (1, False, False, False),  # FIRE
        (0, False, False, True),
        (1, True, False, True),  # the game is over
        (0, False, False, False),  # reset
    ]
    assert seen == game_rows * 2
    assert game.actions == [2, 2, 1, 2, 2, 2] * 2
    assert episodes_of(envs) == [(9.0, 5)] * 2


def test_without_fire_the_step_after_a_lost_life_is_a_decision():
    # vwxyzjn/cleanrl#475 met with life_loss_info: that step is no reset.
    envs, game = scripted(TWO_LIVES, lives=2, actions=(NOOP, UP, ale_py.Action.DOWN))
    assert [decided for *_, decided, _ in play(envs, 2, 7)] == [True, True, True, True, True, False, True]
    assert game.actions == [2] * 7


def test_no_lives_left_is_not_yet_the_end():
    # OpenAI baselines on Qbert: the game goes on for a few frames.
    envs, _ = scripted(
        [(0, False, False, 1), (0, False, False, 0), (0, False, False, 0), (0, True, False, 0)], lives=1
    )
    rows = play(envs, 2, 5)
    assert [terminated for _, terminated, *_ in rows] == [False, False, False, True, False]
    assert [decided for *_, decided, _ in rows] == [True, True, True, True, False]


def test_a_time_limit_is_a_truncation_and_the_lives_of_the_next_game_are_no_loss():
    # Not even where the game was cut with a life more than it had begun with.
    envs, _ = scripted([(0, False, False, 4), (0, False, True, 4)], lives=3)
    assert play(envs, 2, 4) == [
        (0, False, False, True, False),
        (0, False, True, True, True),
        (0, False, False, False, False),
        (0, False, False, True, False),
    ]


def test_a_life_lost_with_the_time_limit_is_a_termination_and_a_reset_follows():
    envs, game = scripted([(0, False, False, 2), (0, False, True, 1)], lives=2)
    assert play(envs, 2, 4)[1:3] == [(0, True, False, True, True), (0, False, False, False, False)]
    assert game.actions == [2] * 4


def test_a_game_that_ends_while_fire_is_pressed_resets_in_the_next_step():
    # DLR-RM/stable-baselines3#1060, #2256
    envs, game = scripted([(0, False, False, 1), (5, True, False, 0)], lives=2)
    assert [(row[1], row[3], row[4]) for row in play(envs, 2, 4)] == [
        (True, True, False),
        (True, False, True),
        (False, False, False),
        (True, True, False),
    ]
    assert game.actions == [2, 1, 2, 2]


def test_rewards_are_replaced_by_their_signs():
    # pytorch/rl#1777: half a point counts as one.
    envs, _ = scripted([(0.5, False, False, 0), (-0.1, False, False, 0), (0, True, False, 0)], lives=0)
    assert [reward for reward, *_ in play(envs, 2, 3)] == [1.0, -1.0, 0.0]


# ----------------------------------------------------------------------------------------- real games


def test_breakout_is_played_to_its_last_life_one_decision_is_four_frames_and_returns_are_raw():
    # sail-sg/envpool#301: lives 4, 3, 2, 1, 0 before 5 again. Without FIRE the second life would last for ever.
    envs = ppo.make_envs(ppo.Config(env_id="ALE/Breakout-v5"), 1)
    _, info = envs.reset(seed=3)
    rng, lives, sums, total = np.random.default_rng(0), [5], [], 0.0
    frame = info["episode_frame_number"][0]
    while len(sums) < 3:
        _, reward, terminated, _, info = envs.step(rng.integers(0, 4, 1))
        if info["lives"][0] != lives[-1]:
            lives.append(info["lives"][0].item())
            assert terminated[0] or lives[-1] == 5
        total += info["reward"][0]
        assert abs(reward[0]) == min(abs(info["reward"][0]), 1)
        if info["game_over"][0]:
            sums.append(total)
            total = 0.0
        elif info["episode_frame_number"][0] > frame:
            assert info["episode_frame_number"][0] == frame + 4
        frame = info["episode_frame_number"][0]
    assert lives == [5, 4, 3, 2, 1, 0] * 3
    assert [value for value, _ in episodes_of(envs)] == sums and sum(sums) > 0


def test_doing_nothing_loses_every_life_of_breakout():
    # Farama-Foundation/Gymnasium PR#805: FIRE starts each ball.
    envs = ppo.make_envs(ppo.Config(env_id="ALE/Breakout-v5"), 1)
    envs.reset(seed=1)
    for _ in range(300):
        *_, info = envs.step(np.array([0]))
        if info["game_over"][0]:
            break
    assert info["game_over"][0] and info["lives"][0] == 0


def test_ms_pacman_has_no_fire_its_lost_lives_cost_no_decision_and_its_rewards_are_raw():
    envs = ppo.make_envs(ppo.Config(env_id="ALE/MsPacman-v5"), 1)
    assert envs.fire is None and envs.single_action_space.n == 9
    envs.reset(seed=1)
    lost, undecided, games, rewards, rng = 0, 0, 0, set(), np.random.default_rng(1)
    for _ in range(1200):
        _, reward, terminated, _, info = envs.step(rng.integers(0, 9, 1))
        rewards.add((info["reward"][0].item(), reward[0].item()))
        lost += bool(terminated[0] and not info["game_over"][0])
        undecided += not info["decided"][0]
        games += bool(info["game_over"][0])
    assert games >= 1 and 2 * games <= lost <= 2 * games + 2  # three lives, the last one's loss is the end
    assert undecided in (games, games - 1)  # the last game may have ended with the last step
    assert {(0, 0), (10, 1)} <= rewards  # a dot is worth 10 points


def test_freeway_which_counts_no_lives_loses_none():
    envs = ppo.make_envs(ppo.Config(env_id="ALE/Freeway-v5"), 2)
    envs.reset(seed=1)
    assert envs.fire is None and envs.single_action_space.n == 3
    for _ in range(100):
        _, _, terminated, truncated, info = envs.step(np.array([1, 2]))
        assert not terminated.any() and not truncated.any() and info["decided"].all() and not info["lives"].any()


def test_observations_are_the_emulators_with_the_newest_picture_last():
    envs = ppo.make_envs(ppo.Config(), 2)
    raw = AtariVectorEnv("pong", 2, reward_clipping=False)
    obs, _ = envs.reset(seed=7)
    raw_obs, _ = raw.reset(seed=7)
    assert obs.shape == (2, 84, 84, 4) and obs.dtype == np.uint8 and obs.flags.c_contiguous
    assert not obs[..., :3].any() and obs[..., 3].any()
    assert envs.observation_space.shape == obs.shape
    for action in (2, 3, 2, 5):
        before, kept = obs, obs.copy()
        obs, raw_obs = envs.step(np.array([action, 0]))[0], raw.step(np.array([action, 0]))[0]
        for plane in range(4):
            np.testing.assert_array_equal(obs[..., plane], raw_obs[:, plane])
        np.testing.assert_array_equal(obs[..., :3], before[..., 1:])
        np.testing.assert_array_equal(before, kept)  # nobody wrote into the last one


def stream(seed, num_envs=3, steps=100, **settings):
    """Everything that `num_envs` games of Breakout show under fixed actions: uint8 [steps, num_envs, 84, 84]."""
    envs = ppo.make_envs(ppo.Config(env_id="ALE/Breakout-v5", **settings), num_envs)
    envs.reset(seed=seed)
    actions = np.random.default_rng(0).integers(0, 4, (steps, 1)).repeat(num_envs, axis=1)
    return np.stack([envs.step(row)[0][..., -1] for row in actions])


def test_seeds_decide_the_games_whatever_the_number_of_threads(monkeypatch):
    first = stream(seed=5)
    assert not np.array_equal(first[:, 0], first[:, 1]) and not np.array_equal(first[:, 1], first[:, 2])
    monkeypatch.setattr(ppo.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    np.testing.assert_array_equal(stream(seed=5), first)
    np.testing.assert_array_equal(stream(seed=6)[:, 0], first[:, 1])  # game i plays seed + i
    assert stream(seed=2**32 - 1, steps=2).any()  # more than the emulator's 31 bits


def test_actions_stick_only_if_asked_for():
    plain = stream(seed=5)
    assert np.array_equal(stream(seed=5, repeat_action_probability=0.0), plain)
    assert not np.array_equal(stream(seed=5, repeat_action_probability=0.5), plain)


# -------------------------------------------------------------------------------------------- network


class Nature(nn.Module):
    """The network of one of the two scripts in plain Flax, with the same names."""

    convolutions: tuple
    hidden: int
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = obs.astype(jnp.float32) / 255.0
        for i, (features, size, stride) in enumerate(self.convolutions):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding="VALID", name=f"Conv_{i}")(x))
        x = nn.relu(nn.Dense(self.hidden, name="Dense_0")(x.reshape(len(x), -1)))
        return nn.Dense(self.num_actions, name="policy")(x), nn.Dense(1, name="value")(x)[:, 0]


@pytest.mark.parametrize("script, layers", [
    (ppo, (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512)), (ppo_flappy, (((16, 4, 4), (32, 4, 2), (32, 3, 1)), 256)),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_networks_on_pictures_are_those_of_flax_in_value_and_gradient_on_every_device(
    script, layers, backend, monkeypatch
):
    # A checkpoint moves between devices, and 255 is 1.
    obs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 84, 84, 4), dtype=np.uint8))
    reference = Nature(*layers, num_actions=5)
    params = jax.jit(reference.init)(jax.random.key(0), obs)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    shapes = jax.eval_shape(script.ActorCritic(5).init, jax.random.key(0), obs)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    @partial(jax.jit, static_argnums=1)
    @partial(jax.value_and_grad, has_aux=True)
    def run(params, apply_fn):
        logits, value = apply_fn(params, obs)
        return (jnp.sin(logits).sum() + (value**2).sum()), (logits, value)

    (_, ours), our_grads = run(params, script.ActorCritic(5).apply)
    (_, flax), flax_grads = run(params, reference.apply)
    assert ours[0].shape == (3, 5) and ours[1].shape == (3,)
    for x, y in zip(jax.tree.leaves((ours, our_grads)), jax.tree.leaves((flax, flax_grads))):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


@pytest.mark.parametrize("size, kernel_size, stride, channels", [(21, 4, 2, 3), (9, 3, 1, 2), (15, 8, 4, 4)])
def test_convolution_as_a_product_is_a_convolution(size, kernel_size, stride, channels):
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(2, size, size, channels)))
    kernel = np.float32(rng.normal(size=(kernel_size, kernel_size, channels, 5)))
    layout = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)
    np.testing.assert_allclose(ppo.conv_as_matmul(x, kernel, (stride, stride)), expected, atol=1e-4)


def test_matmul_has_the_gradient_of_a_product():
    rng = np.random.default_rng(0)
    x, kernel, grad = rng.normal(size=(6, 5)), rng.normal(size=(5, 4)), rng.normal(size=(6, 4))
    y, backward = jax.vjp(ppo.matmul, *map(jnp.float32, (x, kernel)))
    dx, dkernel = backward(jnp.float32(grad))
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5)
    np.testing.assert_allclose(dx, grad @ kernel.T, rtol=1e-5)
    np.testing.assert_allclose(dkernel, x.T @ grad, rtol=1e-4)


# ----------------------------------------------------------------------------------- rollout and update


def play_rollouts(envs, num_steps, rollouts):
    """The columns of several rollouts of one game as lists, in which the agent always does 2."""
    config, state = tiny(ppo, num_envs=1, num_steps=num_steps, num_minibatches=1), initial_state(ppo, tiny(ppo))
    choice = np.array([2], np.int32), np.float32([-0.5]), np.float32([7.0])
    (obs, _), parts = envs.reset(seed=0), []
    for _ in range(rollouts):
        data, state, obs = ppo.rollout(config, lambda params, key, obs: (choice, key), envs, state, obs)
        parts.append(data)
    data = jax.tree.map(lambda *x: np.concatenate(x)[:, 0], *parts)
    assert data.obs.dtype == np.uint8 and data.obs.shape == (rollouts * num_steps, 84, 84, 4)
    return data


def test_rollout_masks_resets_and_fire_and_nothing_else():
    envs, game = scripted(TWO_LIVES, lives=2)
    data = play_rollouts(envs, num_steps=9, rollouts=2)
    assert data.reward.tolist() == [1, -1, 1, 0, 1, 0] * 3
    assert data.valid.tolist() == [True, True, False, True, True, False] * 3
    assert data.terminated.tolist() == data.done.tolist() == [False, True, False, False, True, False] * 3
    assert data.obs[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5] * 3  # what the agent saw before each step
    assert [{*array.tolist()} for array in (data.action, data.value, data.log_prob)] == [{2}, {7.0}, {-0.5}]
    dtypes = [array.dtype.name for array in data]
    assert dtypes == ["uint8", "int32", "float32", "float32", "float32", "bool", "bool", "bool"]
    assert episodes_of(envs) == [(9.0, 5)] * 3


def test_rollout_ends_an_episode_at_truncation_without_termination():
    envs, _ = scripted([(1, False, False, 0), (1, False, True, 0)], lives=0)
    data = play_rollouts(envs, num_steps=6, rollouts=1)
    assert data.done.tolist() == [False, True, False] * 2
    assert data.valid.tolist() == [True, True, False] * 2
    assert not data.terminated.any()


def test_rollout_draws_with_a_new_key_each_step_and_gives_it_on():
    envs, game = scripted([(0, False, False, 0)] * 200, lives=0)
    config, state = tiny(ppo, num_envs=1, num_steps=48, num_minibatches=1), initial_state(ppo, tiny(ppo))
    obs, _ = envs.reset(seed=0)

    def even(params, obs):
        return jnp.zeros((1, 3)), jnp.zeros(1)

    for _ in range(2):
        _, state, obs = ppo.rollout(config, actor(even), envs, state, obs)
    assert min(np.bincount(game.actions, minlength=3)) > 15
    assert game.actions[:48] != game.actions[48:]


def test_take_steps_takes_each_environments_own():
    x = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    rows = np.array([[0, 3], [1, 1], [2, 0]])
    expected = [x[t, n] for n in range(3) for t in rows[n]]
    np.testing.assert_array_equal(ppo.take_steps(jnp.asarray(rows), jnp.asarray(x)), expected)


def test_every_minibatch_has_as_many_steps_of_each_environment_and_each_is_shuffled_by_itself():
    # That every epoch has all of them, in an order of its own, is tested with the other scripts.
    config, seen = tiny(ppo, num_envs=3, num_steps=8, num_minibatches=4, update_epochs=1), []
    data, next_obs = random_rollout(ppo, config)
    numbers = np.stack(np.meshgrid(np.arange(8), np.arange(3), [0.0], indexing="ij"), axis=-1)[:, :, 0]

    def watch(params, obs):
        jax.debug.callback(lambda rows: seen.append(np.array(rows)) if len(rows) == 6 else None, obs, ordered=True)
        return linear(params, obs)

    updater(ppo, config, watch)(initial_state(ppo, config), data._replace(obs=np.float32(numbers)), next_obs)
    jax.effects_barrier()
    assert len(seen) == 4
    for rows in seen:
        assert np.bincount(rows[:, 1].astype(int)).tolist() == [2, 2, 2]
    orders = [np.concatenate([rows[rows[:, 1] == n, 0] for rows in seen]).tolist() for n in range(3)]
    assert len({*map(tuple, orders)}) == 3


SETTINGS = dict(learning_rate=0.05, clip_coef=0.15, gamma=0.9, gae_lambda=0.7, ent_coef=0.02, reward_scale=0.5)


@pytest.mark.parametrize("part_rows", [32, 4])
def test_update_on_pictures_is_that_of_cartpole_in_parts_of_minibatches(part_rows, monkeypatch):
    # One minibatch: where nothing is left to shuffle, only the order of sums differs. Flappy Bird's: test_project.
    monkeypatch.setattr(ppo, "PART_ROWS", part_rows)
    shape = dict(num_envs=4, num_steps=8, num_minibatches=1, update_epochs=3, total_frames=96)
    found = []
    for module in (ppo, ppo_cartpole):
        config = module.Config(**shape, **SETTINGS)
        rollout, next_obs = random_rollout(module, config)
        rollout = rollout._replace(obs=rollout.obs / 10)
        run = jax.jit(partial(module.update, config, linear, module.make_optimizer(config)))
        found.append(run(initial_state(module, config)._replace(update=jnp.int32(1)), rollout, next_obs))
    (state, metrics), (other, other_metrics) = found
    assert metrics["losses/clip_fraction"] > 0.1 and int(state.update) == int(other.update) == 2
    assert metrics.keys() == other_metrics.keys()
    for x, y in zip(jax.tree.leaves((state.params, metrics)), jax.tree.leaves((other.params, other_metrics))):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def rows_seen_by_the_network(batch):
    """The rows of each call that ppo_gradient makes to the network, by the first number of their observation."""
    seen = []

    def watch(params, obs):
        jax.debug.callback(lambda rows: seen.append(rows[:, 0].tolist()), obs, ordered=True)
        return linear(params, obs)

    params = {"policy": jnp.ones((3, 2)), "value": jnp.ones(3)}
    jax.jit(ppo.ppo_gradient, static_argnums=1)(params, watch, batch, 0.2, 0.5, 0.01)
    jax.effects_barrier()
    return seen


def numbered_batch(rows):
    obs = jnp.stack([jnp.arange(float(rows)), jnp.zeros(rows), jnp.zeros(rows)], axis=-1)
    return ppo.Batch(obs, jnp.zeros(rows, int), *jnp.zeros((3, rows)), jnp.ones(rows, bool))


@pytest.mark.parametrize("num_parts", [2, 3])
def test_network_sees_a_minibatch_in_parts_each_row_once(num_parts, monkeypatch):
    monkeypatch.setattr(ppo, "PART_ROWS", 8)
    parts = [list(range(8 * k, 8 * (k + 1))) for k in range(num_parts)]
    assert rows_seen_by_the_network(numbered_batch(8 * num_parts)) == parts


@pytest.mark.parametrize("rows", [4, 8, 20])
def test_a_minibatch_of_no_even_parts_is_taken_whole(rows, monkeypatch):
    monkeypatch.setattr(ppo, "PART_ROWS", 8)
    assert rows_seen_by_the_network(numbered_batch(rows)) == [list(range(rows))]


@pytest.mark.parametrize("name, found", [("default_backend", "gpu"), ("device_count", 2)])
def test_other_devices_take_a_minibatch_whole(name, found, monkeypatch):
    monkeypatch.setattr(ppo, "PART_ROWS", 8)
    monkeypatch.setattr(jax, name, lambda: found)
    assert rows_seen_by_the_network(numbered_batch(24)) == [list(range(24))]


def test_gradient_in_parts_is_that_of_the_whole_minibatch(monkeypatch):
    # The parts differ in their share of valid rows and in their advantages: no mean may be of a part alone.
    monkeypatch.setattr(ppo, "PART_ROWS", 32)
    network, rng = SmallNetwork(num_actions=6), np.random.default_rng(0)
    obs = rng.integers(0, 256, (64, 84, 84, 4), dtype=np.uint8)
    params = network.init(jax.random.key(0), obs)
    valid, advantage = np.arange(64) % 4 < np.where(np.arange(64) < 32, 1, 3), np.linspace(-3, 9, 64) ** 3
    batch = ppo.Batch(obs, rng.integers(0, 6, 64), np.full(64, -1.8), advantage, rng.normal(size=64), valid)
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == float else None), batch)
    whole = jax.grad(ppo.ppo_loss, has_aux=True)
    found, expected = (
        jax.jit(f, static_argnums=1)(params, network.apply, batch, 0.1, 0.5, 0.01) for f in (ppo.ppo_gradient, whole)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(y).max())


def test_optimizer_takes_the_steps_of_the_other_scripts():
    # Three updates of four minibatches; gradients on both sides of the norm at which they are clipped.
    params, rng = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}, np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: jnp.float32(k * rng.normal(size=x.shape)), params) for k in 4 * (1, 0.01, 3)]
    found = []
    for script in (ppo, ppo_cartpole):
        optimizer = script.make_optimizer(tiny(script, learning_rate=0.1))
        state, steps, update = optimizer.init(params), [], jax.jit(optimizer.update)
        for gradient in gradients:
            step, state = update(gradient, state)
            steps.append(step)
        found.append(steps)
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


# ------------------------------------------------------------------------------------------ evaluation


def evaluate_scripted(monkeypatch, *games, **settings):
    """(returns, lengths, capped) as lists, of an agent that prefers the last action of three on scripted games."""
    envs = ppo.AtariEnvs(gym.wrappers.vector.RecordEpisodeStatistics(SideBySide(*games)), [NOOP, FIRE, UP])
    monkeypatch.setattr(ppo, "make_envs", lambda config, num_envs: envs)
    monkeypatch.setattr(ppo, "ActorCritic", SmallNetwork)
    params = SmallNetwork(3).init(jax.random.key(0), np.zeros((1, 84, 84, 4), np.uint8))
    params = jax.tree.map(lambda x: 0 * x, params)
    params["params"]["policy"]["bias"] = jnp.float32([0.0, 0.0, 0.3])
    found = ppo.evaluate(tiny(ppo, **settings), params, len(games), seed=0)
    return [found[name].tolist() for name in ("returns", "lengths", "capped")]


def test_evaluation_plays_whole_games_for_their_own_rewards(monkeypatch):
    game = ScriptedGame(TWO_LIVES, lives=2)
    assert evaluate_scripted(monkeypatch, game, eval_max_steps=50) == [[9.0], [5], [False]]
    assert game.actions == [2, 2, 1, 2, 2]


def test_every_game_is_counted_once_however_short(monkeypatch):
    # DLR-RM/stable-baselines3#402
    games = ScriptedGame([(3, True, False, 0)], lives=1), ScriptedGame(TWO_LIVES, lives=2)
    assert evaluate_scripted(monkeypatch, *games, eval_max_steps=50) == [[3.0, 9.0], [1, 5], [False, False]]


def test_evaluation_is_cut_at_the_cap_and_says_so(monkeypatch):
    game = ScriptedGame(TWO_LIVES, lives=2)
    assert evaluate_scripted(monkeypatch, game, eval_max_steps=3) == [[5.0], [3], [True]]


def test_a_game_that_the_emulator_cuts_is_capped(monkeypatch):
    games = ScriptedGame([(1, False, False, 0), (1, False, True, 0)], lives=0), ScriptedGame(TWO_LIVES, lives=2)
    assert evaluate_scripted(monkeypatch, *games, eval_max_steps=50) == [[2.0, 9.0], [2, 5], [True, False]]


def test_sampled_evaluation_samples(monkeypatch):
    game = ScriptedGame([(0, False, False, 0)] * 60, lives=0)
    evaluate_scripted(monkeypatch, game, eval_max_steps=60, eval_greedy=False)
    shares = np.bincount(game.actions, minlength=3) / 60
    assert np.all(shares > 0.1) and shares[2] > shares[0]  # exp(0.3) = 1.35 times as likely


@pytest.mark.parametrize("greedy, words", [(True, "greedy return over 2"), (False, "sampled return over 2")])
def test_the_line_and_the_summary_of_an_evaluation_say_whether_it_was_greedy(
    tmp_path, monkeypatch, capsys, greedy, words
):
    found = {"returns": np.array([2.0, 4.0]), "lengths": np.array([5, 6]), "capped": np.array([False, True])}
    monkeypatch.setattr(ppo, "evaluate", lambda *args: found)
    summary = ppo.report(tiny(ppo, eval_greedy=greedy), None, tmp_path)
    line = capsys.readouterr().out.splitlines()[0]
    assert words in line and "3.0 +- 1.0" in line and "1 cut at 20 steps (--eval-max-steps)" in line
    assert (summary["eval_greedy"], summary["eval_capped"]) == (greedy, 1)


# ----------------------------------------------------------------------------------------- whole runs


@only_atari
def test_two_updates_with_the_real_network_end_to_end(script, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "ActorCritic", RealNetwork)  # not the small one of the fixture
    config = tiny(ppo, total_frames=16, update_epochs=1, eval_max_steps=4, run_dir=tmp_path / "run")
    result = ppo.train(config)
    rows = read_metrics(tmp_path / "run")
    assert [row["frames"] for row in rows] == ["8", "16"]
    assert all(np.isfinite(float(row["losses/value_loss"])) for row in rows)
    assert (result["env_id"], result["eval_greedy"], result["devices"]) == ("ALE/Pong-v5", True, 1)
    assert (tmp_path / "run" / "agent.gif").stat().st_size > 1000
    assert json.loads((tmp_path / "run" / "config.json").read_text())["repeat_action_probability"] == 0.0


@only_atari
def test_another_game_trains_with_its_own_actions(script, tmp_path):
    config = tiny(ppo, env_id="ALE/Breakout-v5", total_frames=16, run_dir=tmp_path / "run")
    result = ppo.train(config)
    assert (result["env_id"], result["frames"], result["eval_episodes"]) == ("ALE/Breakout-v5", 16, 2)
    assert 0 < float(read_metrics(config.run_dir)[0]["losses/entropy"]) <= np.log(4)


@only_atari
def test_training_resumed_training_and_evaluation_play_games_of_their_own(script, tmp_path, monkeypatch):
    seeds, reset = [], ppo.AtariEnvs.reset

    def note(envs, *, seed=None, options=None):
        seeds.append((envs.num_envs, seed))
        return reset(envs, seed=seed, options=options)

    monkeypatch.setattr(ppo.AtariEnvs, "reset", note)
    config = tiny(ppo, run_dir=tmp_path / "run")
    die_in(ppo, config, "save_checkpoint", at=1)
    ppo.main(["--resume", config.run_dir])
    assert [num_envs for num_envs, _ in seeds] == [2, 2, 2, 1, 1]  # the picture shows the evaluation's first game
    ranges = [set(range(seed, seed + num_envs)) for num_envs, seed in seeds]
    assert len(set.union(*ranges)) == 2 + 2 + 2
    assert seeds[3][1] == seeds[4][1] == seeds[2][1]
