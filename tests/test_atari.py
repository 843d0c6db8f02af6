"""Atari: what the learner sees of scripted and of real games, the network against Flax, the update, whole runs."""

import json
import math

import ale_py
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ale_py.vector_env import AtariVectorEnv
from conftest import linear, read_metrics

import ppo_atari as ppo
import ppo_cartpole

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


def tiny(**changes):
    """A Config that runs in a moment: 3 updates of 4 environments * 8 steps."""
    settings = dict(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2, total_frames=96)
    settings |= dict(checkpoint_every=2, eval_episodes=2, eval_max_steps=6)
    return ppo.Config(**settings | changes)


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
    episodes, seen = [], []
    for _ in range(12):
        _, reward, terminated, truncated, info = envs.step(np.array([2]))
        episodes += ppo.finished_episodes(info)
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
    assert episodes == [(9.0, 5)] * 2


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
    rng, lives, sums, total, episodes = np.random.default_rng(0), [5], [], 0.0, []
    frame = info["episode_frame_number"][0]
    while len(episodes) < 3:
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
        episodes += ppo.finished_episodes(info)
    assert lives == [5, 4, 3, 2, 1, 0] * 3
    assert [value for value, _ in episodes] == sums and sum(sums) > 0


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


def stream(seed, num_envs=3, steps=150, **settings):
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


@pytest.mark.parametrize(
    "env_id, words",
    [("ALE/Pongg-v5", "Did you mean: `Pong`"), ("breakout", "ALE/<Game>-v5"), ("Breakout-v5", "ALE/<Game>-v5"),
     ("ALE/Pong-v4", "ALE/<Game>-v5"), ("CartPole-v1", "ALE/<Game>-v5")],
)  # fmt: skip
def test_other_ids_are_refused_in_one_line(env_id, words, capsys, tmp_path):
    assert ppo.main(["--env-id", env_id, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num-steps", "10", "--num-minibatches", "4"], "--num-minibatches 4"),
        (["--repeat-action-probability", "1.5"], "--repeat-action-probability"),
        (["--process-id", "0"], "--distributed"),
        (["--distributed", "--num-processes", "2"], "--distributed"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(flags, words, capsys, tmp_path):
    assert ppo.main([*flags, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------- network


class FlaxNature(nn.Module):
    """The network in plain Flax, with the same names."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = obs.astype(jnp.float32) / 255.0
        for i, (features, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding="VALID", name=f"Conv_{i}")(x))
        x = nn.relu(nn.Dense(512, name="Dense_0")(x.reshape(len(x), -1)))
        return nn.Dense(self.num_actions, name="policy")(x), nn.Dense(1, name="value")(x)[:, 0]


def test_network_is_the_nature_network_of_flax_in_value_and_gradient():
    obs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (6, 84, 84, 4), dtype=np.uint8))
    network = ppo.ActorCritic(5)
    params = network.init(jax.random.key(0), obs)
    shapes = {name: layer["kernel"].shape for name, layer in params["params"].items()}
    assert shapes["Conv_0"] == (8, 8, 4, 32) and shapes["Dense_0"] == (7 * 7 * 64, 512)

    def loss(params, apply_fn):
        logits, value = apply_fn(params, obs)
        return (jnp.sin(logits * 50).sum() + (value**2).sum()), (logits, value)

    (_, ours), our_grads = jax.value_and_grad(loss, has_aux=True)(params, network.apply)
    (_, flax), flax_grads = jax.value_and_grad(loss, has_aux=True)(params, FlaxNature(5).apply)
    assert ours[0].shape == (6, 5) and ours[1].shape == (6,)
    for x, y in zip(jax.tree.leaves((ours, our_grads)), jax.tree.leaves((flax, flax_grads))):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_convolution_is_the_same_on_a_gpu(monkeypatch):
    # The other form, which a GPU runs, with the parameters of the CPU: a checkpoint moves between them.
    obs = jnp.asarray(np.random.default_rng(1).integers(0, 256, (2, 84, 84, 4), dtype=np.uint8))
    params = ppo.ActorCritic(3).init(jax.random.key(0), obs)
    here = ppo.ActorCritic(3).apply(params, obs)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    there_params = ppo.ActorCritic(3).init(jax.random.key(0), obs)
    there = ppo.ActorCritic(3).apply(params, obs)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, there_params)
    for x, y in zip(here, there):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_initial_weights_are_orthogonal():
    params = ppo.ActorCritic(3).init(jax.random.key(0), np.zeros((1, 84, 84, 4), np.uint8))["params"]
    gains = {"policy": 0.01, "value": 1.0}
    for name, layer in params.items():
        kernel = np.asarray(layer["kernel"]).reshape(-1, layer["kernel"].shape[-1])
        np.testing.assert_allclose(np.linalg.svd(kernel)[1], gains.get(name, math.sqrt(2)), rtol=1e-4)
        assert not layer["bias"].any()
    assert len(params) == 6


def test_matmul_has_the_gradient_of_a_product():
    rng = np.random.default_rng(0)
    x, kernel, grad = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 4)), rng.normal(size=(2, 3, 4))
    y, backward = jax.vjp(ppo.matmul, *map(jnp.float32, (x, kernel)))
    dx, dkernel = backward(jnp.float32(grad))
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5)
    np.testing.assert_allclose(dx, grad @ kernel.T, rtol=1e-5)
    np.testing.assert_allclose(dkernel, np.einsum("abk,abf->kf", x, grad), rtol=1e-4)


# ----------------------------------------------------------------------------------- rollout and update


def test_rollout_masks_resets_and_fire_and_nothing_else():
    envs, _ = scripted(TWO_LIVES, lives=2)
    config = tiny(num_envs=1, num_steps=9, num_minibatches=1)

    def act_fn(params, buffer, key, obs, t):
        return buffer, key, np.array([2])

    state = ppo.TrainState({}, (), jax.random.key(0), jnp.int32(0))
    buffer = ppo.make_buffer(config, envs.observation_space)
    obs, _ = envs.reset(seed=0)
    rows, episodes = [], []
    for _ in range(2):
        _, _, data, obs, ended = ppo.rollout(config, act_fn, envs, state, buffer, obs)
        rows.append(data)
        episodes += ended
    reward, terminated, done, valid = (
        np.concatenate([getattr(data, name)[:, 0] for data in rows])
        for name in ("reward", "terminated", "done", "valid")
    )
    assert reward.tolist() == [1, -1, 1, 0, 1, 0] * 3
    assert valid.tolist() == [True, True, False, True, True, False] * 3
    assert terminated.tolist() == done.tolist() == [False, True, False, False, True, False] * 3
    assert episodes == [(9.0, 5)] * 3


def test_rollout_ends_an_episode_at_truncation_without_termination():
    envs, _ = scripted([(1, False, False, 0), (1, False, True, 0)], lives=0)
    config = tiny(num_envs=1, num_steps=6, num_minibatches=1)
    state = ppo.TrainState({}, (), jax.random.key(0), jnp.int32(0))
    buffer = ppo.make_buffer(config, envs.observation_space)
    obs, _ = envs.reset(seed=0)
    _, _, data, _, _ = ppo.rollout(config, lambda *args: (args[1], args[2], np.array([2])), envs, state, buffer, obs)
    assert data.done[:, 0].tolist() == [False, True, False] * 2
    assert data.valid[:, 0].tolist() == [True, True, False] * 2
    assert not data.terminated.any()


def random_rollout(config, seed):
    """(params, Rollout, next obs) of made-up numbers, three to an observation, some rows not valid."""
    rng, shape = np.random.default_rng(seed), (config.num_steps, config.num_envs)
    params = {"policy": jnp.float32(rng.normal(size=(3, 2))), "value": jnp.float32(rng.normal(size=3))}
    obs, action = np.float32(rng.normal(size=(*shape, 3))), rng.integers(0, 2, shape)
    log_probs = jax.nn.log_softmax(obs @ np.asarray(params["policy"]))
    log_prob = np.take_along_axis(np.asarray(log_probs), action[..., None], axis=-1)[..., 0]
    value, reward = np.float32(obs @ np.asarray(params["value"])), np.float32(rng.normal(size=shape))
    terminated, valid = rng.random(shape) < 0.1, rng.random(shape) < 0.8
    done = terminated | (rng.random(shape) < 0.2)
    assert 0 < terminated.sum() < done.sum()
    data = ppo.Rollout(obs, action, log_prob, value, reward, terminated, done, valid)
    return params, data, np.float32(rng.normal(size=(config.num_envs, 3)))


def test_take_steps_takes_each_environments_own():
    x = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    rows = np.array([[0, 3], [1, 1], [2, 0]])
    expected = [x[t, n] for n in range(3) for t in rows[n]]
    np.testing.assert_array_equal(ppo.take_steps(jnp.asarray(rows), jnp.asarray(x)), expected)


def test_every_minibatch_has_as_many_steps_of_each_environment_and_every_epoch_all_of_them():
    config = tiny(num_envs=3, num_steps=8, num_minibatches=4, update_epochs=2)
    params, data, next_obs = random_rollout(config, seed=0)
    steps, envs = np.meshgrid(np.arange(8), np.arange(3), indexing="ij")
    data = data._replace(obs=np.float32(np.stack([steps, envs, 0 * steps], axis=-1)))
    seen = []

    def watch(params, obs):
        jax.debug.callback(lambda rows: seen.append(np.array(rows)) if len(rows) == 6 else None, obs, ordered=True)
        return linear(params, obs)

    optimizer = ppo.make_optimizer(config)
    state = ppo.TrainState(params, optimizer.init(params), jax.random.key(0), jnp.int32(0))
    ppo.update(config, watch, optimizer, state._replace(key=jax.random.key(1)), data, next_obs)
    jax.effects_barrier()
    of_another_key, seen = seen[:], []
    ppo.update(config, watch, optimizer, state, data, next_obs)
    jax.effects_barrier()
    assert len(seen) == 8
    assert not all(np.array_equal(x, y) for x, y in zip(seen, of_another_key))
    for rows in seen:
        assert np.bincount(rows[:, 1].astype(int)).tolist() == [2, 2, 2]
    for epoch in (seen[:4], seen[4:]):
        assert sorted(map(tuple, np.concatenate(epoch)[:, :2].tolist())) == [
            (t, n) for t in range(8) for n in range(3)
        ]
    assert not all(np.array_equal(x, y) for x, y in zip(seen[:4], seen[4:]))  # shuffled anew
    assert not np.array_equal(seen[0][:2, 0], seen[0][2:4, 0])  # and each environment by itself


def test_update_with_one_minibatch_is_the_gradient_step_written_out():
    config = tiny(num_minibatches=1, update_epochs=1, gamma=0.9, gae_lambda=0.8, ent_coef=0.02, reward_scale=0.5)
    params, data, next_obs = random_rollout(config, seed=1)
    optimizer = ppo.make_optimizer(config)
    state = ppo.TrainState(params, optimizer.init(params), jax.random.key(0), jnp.int32(0))
    new, _ = ppo.update(config, linear, optimizer, state, data, next_obs)

    advantages, targets = ppo.compute_gae(
        0.5 * data.reward, data.value, next_obs @ params["value"], data.terminated, data.done, 0.9, 0.8
    )
    batch = ppo.Batch(data.obs, data.action, data.log_prob, advantages, targets, data.valid)
    batch = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), batch)
    grads, _ = jax.grad(ppo.ppo_loss, has_aux=True)(params, linear, batch, config.clip_coef, config.vf_coef, 0.02)
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(config.learning_rate, eps=1e-5))
    updates, _ = adam.update(grads, adam.init(params))
    for name, expected in optax.apply_updates(params, updates).items():
        np.testing.assert_allclose(new.params[name], expected, atol=1e-6)
        assert not np.allclose(new.params[name], params[name], atol=1e-6)


@pytest.mark.parametrize("part_rows", [32, 16, 4])  # the whole minibatch, two parts, eight
def test_update_with_one_minibatch_is_that_of_the_other_scripts(part_rows, monkeypatch):
    # Where nothing is left to shuffle, only the order of sums differs. Ratios leave the annealed clip range.
    monkeypatch.setattr(ppo, "PART_ROWS", part_rows)
    settings = dict(num_envs=4, num_steps=8, num_minibatches=1, update_epochs=5, total_frames=96)
    settings |= dict(learning_rate=0.05, clip_coef=0.15, gamma=0.9, gae_lambda=0.7, ent_coef=0.02, reward_scale=0.5)
    params, data, next_obs = jax.tree.map(jnp.asarray, random_rollout(tiny(**settings), seed=2))
    found = []
    for script in (ppo, ppo_cartpole):
        config = script.Config(**settings)
        optimizer = script.make_optimizer(config)
        opt_state = optimizer.init(params)
        state = script.TrainState(params, opt_state, jax.random.key(0), jnp.int32(1))  # the second of three
        found.append(script.update(config, linear, optimizer, state, data, next_obs))
    (state, metrics), (other, other_metrics) = found
    assert metrics["clip_fraction"] > 0.1 and int(state.update) == int(other.update) == 2
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
    ppo.ppo_gradient(params, watch, batch, 0.2, 0.5, 0.01)
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


def test_gradient_in_parts_is_that_of_the_whole_minibatch_for_the_real_network(monkeypatch):
    monkeypatch.setattr(ppo, "PART_ROWS", 32)
    network, rng = ppo.ActorCritic(num_actions=6), np.random.default_rng(0)
    obs = rng.integers(0, 256, (64, 84, 84, 4), dtype=np.uint8)
    params = network.init(jax.random.key(0), obs)
    # The parts differ in their share of valid rows and in their advantages: no mean may be of a part alone.
    valid, advantage = np.arange(64) % 4 < np.where(np.arange(64) < 32, 1, 3), np.linspace(-3, 9, 64) ** 3
    batch = ppo.Batch(obs, rng.integers(0, 6, 64), np.full(64, -1.8), advantage, rng.normal(size=64), valid)
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == float else None), batch)
    found = ppo.ppo_gradient(params, network.apply, batch, 0.1, 0.5, 0.01)
    expected = jax.grad(ppo.ppo_loss, has_aux=True)(params, network.apply, batch, 0.1, 0.5, 0.01)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(y).max())


def test_optimizer_takes_the_steps_of_the_other_scripts():
    # Three updates of four minibatches; gradients on both sides of the norm at which they are clipped.
    settings = dict(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2, total_frames=96)
    params, rng = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}, np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: jnp.float32(k * rng.normal(size=x.shape)), params) for k in 4 * (1, 0.01, 3)]
    found = []
    for script in (ppo, ppo_cartpole):
        optimizer = script.make_optimizer(script.Config(**settings, learning_rate=0.1))
        state, steps = optimizer.init(params), []
        for gradient in gradients:
            step, state = optimizer.update(gradient, state)
            steps.append(step)
        found.append(steps)
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


# ------------------------------------------------------------------------------------------ evaluation


def evaluate_scripted(monkeypatch, *games, **settings):
    """Evaluate an agent that prefers the last action of three on scripted games."""
    envs = ppo.AtariEnvs(gym.wrappers.vector.RecordEpisodeStatistics(SideBySide(*games)), [NOOP, FIRE, UP])
    monkeypatch.setattr(ppo, "make_envs", lambda config, num_envs: envs)
    shapes = jax.eval_shape(ppo.ActorCritic(3).init, jax.random.key(0), np.zeros((1, 84, 84, 4), np.uint8))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    params["params"]["policy"] = {"kernel": jnp.zeros((512, 3)), "bias": jnp.float32([0.0, 0.0, 0.3])}
    return ppo.evaluate(tiny(**settings), params, len(games), seed=0)


def test_evaluation_plays_whole_games_for_their_own_rewards(monkeypatch):
    game = ScriptedGame(TWO_LIVES, lives=2)
    result = evaluate_scripted(monkeypatch, game, eval_max_steps=50)
    assert (result.returns.tolist(), result.lengths.tolist(), result.capped.tolist()) == ([9.0], [5], [False])
    assert game.actions == [2, 2, 1, 2, 2]
    assert result.summary()["eval_greedy"] is True and "greedy" in str(result)


def test_every_game_is_counted_once_however_short(monkeypatch):
    # DLR-RM/stable-baselines3#402
    games = ScriptedGame([(3, True, False, 0)], lives=1), ScriptedGame(TWO_LIVES, lives=2)
    result = evaluate_scripted(monkeypatch, *games, eval_max_steps=50)
    assert (result.returns.tolist(), result.lengths.tolist()) == ([3.0, 9.0], [1, 5])


def test_evaluation_is_cut_at_the_cap_and_says_so(monkeypatch):
    result = evaluate_scripted(monkeypatch, ScriptedGame(TWO_LIVES, lives=2), eval_max_steps=3)
    assert (result.returns.tolist(), result.lengths.tolist(), result.capped.tolist()) == ([5.0], [3], [True])
    assert "1 capped" in str(result)


def test_a_game_that_the_emulator_cuts_is_capped(monkeypatch):
    games = ScriptedGame([(1, False, False, 0), (1, False, True, 0)], lives=0), ScriptedGame(TWO_LIVES, lives=2)
    result = evaluate_scripted(monkeypatch, *games, eval_max_steps=50)
    assert (result.lengths.tolist(), result.capped.tolist()) == ([2, 5], [True, False])


def test_sampled_evaluation_samples(monkeypatch):
    game = ScriptedGame([(0, False, False, 0)] * 60, lives=0)
    result = evaluate_scripted(monkeypatch, game, eval_max_steps=60, eval_greedy=False)
    shares = np.bincount(game.actions, minlength=3) / 60
    assert np.all(shares > 0.1) and shares[2] > shares[0]  # exp(0.3) = 1.35 times as likely
    assert "sampled" in str(result)


# ----------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "ALE/Breakout-v5", "ALE/MsPacman-v5", "ALE/Freeway-v5"])
def test_two_updates_end_to_end(env_id, tmp_path):
    config = tiny(env_id=env_id, total_frames=64, run_dir=str(tmp_path / "run"))
    result = ppo.train(config)
    rows = read_metrics(tmp_path / "run")
    assert [row["frames"] for row in rows] == ["32", "64"]
    assert all(np.isfinite(float(row["losses/value_loss"])) for row in rows)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["env_id"], result["frames"], result["eval_episodes"]) == (env_id, 64, 2)
    assert (tmp_path / "run" / "agent.gif").stat().st_size > 1000
    assert json.loads((tmp_path / "run" / "config.json").read_text())["repeat_action_probability"] == 0.0


def dies_after(save):
    """A save_checkpoint that stops the run, as a crash does, after the second of three updates."""

    def save_and_die(*args):
        save(*args)
        raise MemoryError

    return save_and_die


def test_resumed_run_goes_on_where_it_stopped_and_its_agent_can_be_evaluated(tmp_path, capsys):
    run_dir = tmp_path / "run"
    full = tiny(run_dir=str(run_dir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "save_checkpoint", dies_after(ppo.save_checkpoint))
        with pytest.raises(MemoryError):
            ppo.train(full)
    before = (run_dir / "metrics.csv").read_text()
    assert before.splitlines()[-1].startswith("64,")
    assert ppo.main(["--resume", str(run_dir), "--num-processes", "2"]) == 2  # without --distributed
    assert ppo.main(["--resume", str(run_dir)]) == 0
    after = (run_dir / "metrics.csv").read_text()
    assert after.startswith(before) and after.splitlines()[-1].startswith("96,")
    assert ppo.main(["--resume", str(run_dir), "--learning-rate", "1"]) == 2
    flags = ["--eval-episodes", "1", "--eval-max-steps", "4", "--no-eval-greedy", "--run-dir", str(tmp_path / "eval")]
    assert ppo.main(["--evaluate", str(run_dir), *flags]) == 0
    saved = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert (saved["eval_episodes"], saved["eval_capped"], saved["eval_greedy"]) == (1, 1, False)
    assert "sampled return over 1 episodes" in capsys.readouterr().out


def test_training_resumed_training_and_evaluation_play_games_of_their_own(tmp_path, monkeypatch):
    seeds, reset = [], ppo.AtariEnvs.reset

    def note(envs, *, seed=None, options=None):
        seeds.append((envs.num_envs, seed))
        return reset(envs, seed=seed, options=options)

    monkeypatch.setattr(ppo.AtariEnvs, "reset", note)
    monkeypatch.setattr(ppo, "record_gif", lambda *args: None)
    config = tiny(run_dir=str(tmp_path / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "save_checkpoint", dies_after(ppo.save_checkpoint))
        with pytest.raises(MemoryError):
            ppo.train(config)
    ppo.main(["--resume", str(tmp_path / "run")])
    assert [num_envs for num_envs, _ in seeds] == [4, 4, 2]
    ranges = [set(range(seed, seed + num_envs)) for num_envs, seed in seeds]
    assert len(set.union(*ranges)) == 4 + 4 + 2


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    config, obs = tiny(), np.zeros((1, 84, 84, 4), np.uint8)
    state = ppo.init_state(ppo.ActorCritic(6), ppo.make_optimizer(config), obs, 0)
    flattened = ppo_cartpole.make_optimizer(config).init(state.params)
    ppo.save_checkpoint(tmp_path, state._replace(opt_state=flattened), 0.0)
    with pytest.raises(ppo.UsageError, match="00000000.msgpack: another network's or optimizer's"):
        ppo.load_checkpoint(tmp_path, state)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path, monkeypatch, capsys):
    config, rollout = tiny(checkpoint_every=1, run_dir=str(tmp_path / "run")), ppo.rollout

    def with_nan(config, act_fn, envs, state, buffer, obs):
        state, buffer, data, *rest = rollout(config, act_fn, envs, state, buffer, obs)
        return state, buffer, data._replace(reward=data.reward * (np.nan if int(state.update) == 1 else 1)), *rest

    monkeypatch.setattr(ppo, "rollout", with_nan)
    monkeypatch.setattr(ppo, "parse_args", lambda args: config)
    assert ppo.main() == 1
    assert "not finite" in capsys.readouterr().err
    assert [path.stem for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000001"]
