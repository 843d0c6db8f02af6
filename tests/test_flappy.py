"""Flappy Bird from pixels: the environment against the package's own rendering and game, the network against Flax."""

import csv
import json
import os
import subprocess
import sys
from functools import partial

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, initial_state, linear, random_rollout, tiny
from flappy_bird_gymnasium import FlappyBirdEnv
from PIL import Image

import ppo_cartpole
import ppo_flappy as ppo


def play(env, actions):
    """What `env` gives for a list of actions: a list of (obs, reward, terminated, truncated, info)."""
    steps = []
    for action in actions:
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


def some_flaps(length, seed=0, probability=0.08):
    return (np.random.default_rng(seed).random(length) < probability).astype(int).tolist()


class ScriptedGame:
    """Stands in for the game: ends at its `end`-th frame, with reward 1, 2, 3, ... and score = frame // 2."""

    def __init__(self, end):
        self.end, self.actions = end, []

    def step(self, action):
        self.actions.append(action)
        frame = len(self.actions)
        return None, float(frame), frame == self.end, False, {"score": frame // 2}


def scripted(frame_skip, end):
    env = ppo.FlappyPixels(frame_skip)
    env.reset(seed=0)
    screen_game, env.game = env.game, ScriptedGame(end)
    env.game._surface, env.game._draw_surface = screen_game._surface, screen_game._draw_surface
    return env


# ------------------------------------------------------------------------------------- environment


def area_weights(size, pixels):
    """[pixels, size]: row i averages what pixel i of the small picture covers of the large one."""
    edges = np.arange(pixels + 1) * size / pixels
    low, high = np.maximum.outer(edges[:-1], np.arange(size)), np.minimum.outer(edges[1:], np.arange(1, size + 1))
    return np.clip(high - low, 0, None) * pixels / size


def test_picture_is_the_packages_rendering_cropped_scaled_and_one_channel():
    # The reference: the package's render(), an exact area average in NumPy. smoothscale rounds down, by up to 3.
    env = ppo.FlappyPixels(frame_skip=1)
    env.reset(seed=3)
    rows, columns = area_weights(404, 84), area_weights(288, 84)
    worst = 0.0
    for action in some_flaps(45, seed=1):
        obs, *_ = env.step(action)
        green = env.render()[:404, :, 1].astype(float)
        worst = max(worst, np.abs(obs[..., -1] - rows @ green @ columns.T).max())
    assert worst <= 3.0
    assert np.ptp(obs[..., -1]) > 50  # there is something to see


def test_game_is_the_packages_game_without_lidar():
    env, game = ppo.FlappyPixels(frame_skip=1), FlappyBirdEnv(use_lidar=False)
    env.reset(seed=5)
    game.reset(seed=5)
    for action in some_flaps(200, seed=2):
        _, reward, terminated, _, info = env.step(action)
        _, game_reward, game_terminated, _, game_info = game.step(action)
        assert (reward, terminated, info["score"]) == (game_reward, game_terminated, game_info["score"])
        if terminated:
            break
    assert terminated


def test_a_flap_is_one_flap_and_rewards_are_summed():
    env = scripted(frame_skip=3, end=100)
    _, reward, terminated, truncated, _ = env.step(np.int64(1))
    assert env.game.actions == [1, 0, 0] and type(env.game.actions[0]) is int
    assert (reward, terminated, truncated) == (1 + 2 + 3, False, False)


def test_an_episode_that_ends_inside_a_skip_ends_there():
    env = scripted(frame_skip=4, end=2)
    _, reward, terminated, truncated, info = env.step(0)
    assert env.game.actions == [0, 0]
    assert (reward, terminated, truncated, info["score"]) == (1 + 2, True, False, 1)


def test_stack_holds_the_last_four_pictures_newest_last_in_arrays_of_their_own():
    env = ppo.FlappyPixels(frame_skip=2)
    observations = [env.reset(seed=0)[0]]
    kept = observations[0].copy()
    observations += [obs for obs, *_ in play(env, [1, 0, 0, 1, 0, 0])]
    for before, after in zip(observations, observations[1:]):
        assert np.array_equal(before[..., 1:], after[..., :3])
    assert np.array_equal(observations[0], kept)
    assert not np.array_equal(observations[1][..., 3], observations[2][..., 3])
    assert observations[0].shape == (84, 84, 4) and observations[0].dtype == np.uint8


def test_autoreset_clears_the_stack_and_gives_no_transition():
    envs = ppo.make_envs(ppo.Config(max_episode_steps=5), num_envs=2)
    first, _ = envs.reset(seed=1)
    steps = [envs.step(np.array([0, 1])) for _ in range(6)]
    obs, reward, terminated, truncated, _ = steps[5]
    assert np.array_equal(obs[..., 0], obs[..., 3]) and np.array_equal(obs[0][..., 3], first[0][..., 3])
    assert not reward.any() and not terminated.any() and not truncated.any()
    assert not np.array_equal(steps[4][0][..., 0], steps[4][0][..., 3])  # the last observation keeps its pictures
    envs.close()


def test_step_cap_is_a_truncation_and_statistics_count_it():
    envs = ppo.make_envs(ppo.Config(max_episode_steps=5, frame_skip=1), num_envs=2)
    envs.reset(seed=1)
    steps = [envs.step(np.zeros(2, int)) for _ in range(11)]
    ends = [index for index, step in enumerate(steps) if step[3].any()]
    assert ends == [4, 10]  # step 5 is the reset
    assert not any(step[2].any() for step in steps)
    assert ppo.finished_episodes(steps[4][4]) == [(pytest.approx(0.5), 5, 0)] * 2
    assert ppo.finished_episodes(steps[5][4]) == []
    envs.close()


def test_threads_give_what_gymnasiums_sync_vector_env_gives():
    def make_env():
        return gym.wrappers.TimeLimit(ppo.FlappyPixels(2), 40)

    threaded, sync = ppo.ThreadedVectorEnv([make_env() for _ in range(3)]), gym.vector.SyncVectorEnv([make_env] * 3)
    assert np.array_equal(threaded.reset(seed=7)[0], sync.reset(seed=7)[0])
    ended = 0
    for actions in np.array(some_flaps(300)).reshape(100, 3):
        ours, theirs = threaded.step(actions), sync.step(actions)
        for mine, reference in zip(ours[:4], theirs[:4]):
            assert np.array_equal(mine, reference)
        assert np.array_equal(ours[4]["score"], theirs[4]["score"])
        ended += int((ours[2] | ours[3]).sum())
    assert ended > 3
    threaded.close()


def test_seeds_decide_the_pipes():
    def last_picture(seed):
        env = ppo.FlappyPixels(frame_skip=1)
        env.reset(seed=seed)
        return play(env, [0, 0, 0, 0, 1] + [0] * 10 + [1] + [0] * 13 + [1] + [0] * 10)[-1][0]

    assert np.array_equal(last_picture(1), last_picture(1))
    assert not np.array_equal(last_picture(1), last_picture(2))


def test_runs_without_a_display_and_says_nothing():
    env = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "SDL_VIDEODRIVER")}
    code = "import ppo_flappy as p; e = p.FlappyPixels(2); e.reset(seed=0); e.step(1)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_environment_is_refused_with_the_right_name(capsys):
    assert ppo.main(["--env-id", "FlapyBird-v0"]) == 2
    assert "FlappyBird-v0" in capsys.readouterr().err


def test_an_evaluation_beyond_the_episode_cap_is_refused(capsys):
    assert ppo.main(["--eval-max-steps", "100", "--max-episode-steps", "99"]) == 2
    assert "--max-episode-steps" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- network


@pytest.mark.parametrize(
    "features, kernel_size, stride, size", [(16, 4, 4, 84), (32, 4, 2, 21), (32, 3, 1, 9), (8, 8, 4, 84)]
)
def test_convolution_as_a_product_is_flaxs_convolution(features, kernel_size, stride, size):
    x = jax.random.normal(jax.random.key(0), (2, size, size, 4))
    ours = ppo.Conv(features, kernel_size, stride)
    flax = nn.Conv(features, (kernel_size, kernel_size), (stride, stride), "VALID")
    params = flax.init(jax.random.key(1), x)
    params = jax.tree.map(lambda p: p + 0.1, params)  # so that the bias matters
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, ours.init(jax.random.key(1), x))

    def loss(layer):
        return lambda params, x: (jnp.sin(layer.apply(params, x))).sum()

    np.testing.assert_allclose(ours.apply(params, x), flax.apply(params, x), atol=1e-4)
    for mine, reference in zip(jax.grad(loss(ours), (0, 1))(params, x), jax.grad(loss(flax), (0, 1))(params, x)):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(reference)):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


def test_convolution_is_the_same_off_the_cpu(monkeypatch):
    x, layer = jax.random.normal(jax.random.key(0), (2, 21, 21, 3)), ppo.Conv(8, 4, 2)
    params = layer.init(jax.random.key(1), x)
    as_product = layer.apply(params, x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_allclose(layer.apply(params, x), as_product, atol=1e-4)
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(1), x)) == jax.tree.map(jnp.shape, params)


def test_network_reads_bytes_as_numbers_from_0_to_1():
    network = ppo.ActorCritic(2)
    obs = np.random.default_rng(0).integers(0, 256, (3, 84, 84, 4), np.uint8)
    params = network.init(jax.random.key(0), obs)
    p, x = params["params"], jnp.asarray(obs, jnp.float32) / 255.0
    for index, stride in enumerate((4, 2, 1)):
        kernel, bias = p[f"Conv_{index}"]["kernel"], p[f"Conv_{index}"]["bias"]
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jnp.maximum(x + bias, 0.0)
    x = jnp.maximum(x.reshape(3, -1) @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"], 0.0)
    logits, value = network.apply(params, obs)
    assert p["Conv_0"]["kernel"].shape == (4, 4, 4, 16)
    assert logits.shape == (3, 2) and value.shape == (3,)
    np.testing.assert_allclose(logits, x @ p["policy"]["kernel"] + p["policy"]["bias"], atol=1e-5)
    np.testing.assert_allclose(value, (x @ p["value"]["kernel"] + p["value"]["bias"])[:, 0], atol=1e-5)


# -------------------------------------------------------------------------- evaluation and training


class EndsAt(gym.Env):
    """Black pictures and reward 1; ends after `length` steps (never if None) and passes a pipe each step."""

    observation_space, action_space = ppo.FlappyPixels.observation_space, ppo.FlappyPixels.action_space

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.step_count = 0
        return np.zeros((84, 84, 4), np.uint8), {"score": 0}

    def step(self, action):
        self.step_count += 1
        return np.zeros((84, 84, 4), np.uint8), 1.0, self.step_count == self.length, False, {"score": self.step_count}


@pytest.fixture
def params():
    return ppo.ActorCritic(2).init(jax.random.key(0), np.zeros((1, 84, 84, 4), np.uint8))


def test_an_agent_that_never_ends_is_cut_and_reported(monkeypatch, params):
    def make_envs(config, num_envs):
        return ppo.ThreadedVectorEnv([EndsAt(length) for length in (3, None)])

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    result = ppo.evaluate(ppo.Config(eval_max_steps=7), params, episodes=2, seed=1)
    assert result.capped.tolist() == [False, True]
    assert result.lengths.tolist() == [3, 7] and result.returns.tolist() == [3.0, 7.0]
    assert result.scores.tolist() == [3, 7]  # not the score of the game that began after the reset
    assert result.summary()["eval_score_mean"] == 5.0 and result.summary()["eval_capped"] == 1


def test_an_episode_that_max_episode_steps_cuts_is_capped(monkeypatch, params):
    def make_envs(config, num_envs):
        envs = [EndsAt(length) for length in (3, None)]
        return ppo.ThreadedVectorEnv([gym.wrappers.TimeLimit(env, config.max_episode_steps) for env in envs])

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    result = ppo.evaluate(ppo.Config(eval_max_steps=7, max_episode_steps=7), params, episodes=2, seed=1)
    assert (result.lengths.tolist(), result.capped.tolist()) == ([3, 7], [False, True])


@pytest.mark.parametrize("part_rows", [8, 4, 1])  # the whole minibatch, two parts, eight
def test_update_is_that_of_cartpole_in_parts_of_minibatches(part_rows, monkeypatch):
    monkeypatch.setattr(ppo, "PART_ROWS", part_rows)
    config = tiny(num_envs=4, learning_rate=0.05, clip_coef=0.15, ent_coef=0.02, reward_scale=0.5)
    rollout, next_obs = random_rollout(config)
    rollout = rollout._replace(obs=rollout.obs / 10)
    found = []
    for script in (ppo, ppo_cartpole):
        run = jax.jit(partial(script.update, config, linear, script.make_optimizer(config)))
        found.append(run(initial_state(config), rollout, next_obs))
    (state, metrics), (other, other_metrics) = found
    assert metrics["clip_fraction"] > 0.1 and metrics.keys() == other_metrics.keys()
    for x, y in zip(jax.tree.leaves((state.params, metrics)), jax.tree.leaves((other.params, other_metrics))):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_two_updates_end_to_end(tmp_path):
    run_dir = tmp_path / "run"
    arguments = "--num-envs 2 --num-steps 40 --num-minibatches 2 --update-epochs 1 --total-frames 160"
    arguments += f" --eval-episodes 2 --eval-max-steps 30 --run-dir {run_dir}"
    assert ppo.main(arguments.split()) == 0
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    assert [row["frames"] for row in rows] == ["80", "160"]
    assert float(rows[0]["charts/episodic_score"]) >= 0 and float(rows[0]["charts/episodic_length"]) > 1
    result = json.loads((run_dir / "result.json").read_text())
    assert {"eval_score_mean", "eval_return_mean", "eval_capped", "sps"} <= set(result)
    assert "flappy-bird-gymnasium" in result["versions"]
    with Image.open(run_dir / "agent.gif") as image:
        assert image.size == (144, 256) and image.n_frames > 1


def test_observations_are_stored_once_as_bytes():
    config = ppo.Config()
    obs = jax.ShapeDtypeStruct((config.num_envs, 84, 84, 4), np.uint8)
    assert ppo.make_buffer(config, obs)[0].nbytes == config.num_envs * config.num_steps * 84 * 84 * 4
