"""Flappy Bird from pixels: the environment against the package's own rendering and game, scores, and a whole run."""

import os
import subprocess
import sys
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest
from conftest import ROOT, SmallNetwork, read_metrics, tiny
from flappy_bird_gymnasium import FlappyBirdEnv
from PIL import Image

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
    envs = ppo.make_envs(ppo.Config(max_episode_steps=5, eval_max_steps=5), num_envs=2)
    first, _ = envs.reset(seed=1)
    steps = [envs.step(np.array([0, 1])) for _ in range(6)]
    obs, reward, terminated, truncated, _ = steps[5]
    assert np.array_equal(obs[..., 0], obs[..., 3]) and np.array_equal(obs[0][..., 3], first[0][..., 3])
    assert not reward.any() and not terminated.any() and not truncated.any()
    assert not np.array_equal(steps[4][0][..., 0], steps[4][0][..., 3])  # the last observation keeps its pictures
    envs.close()


def test_step_cap_is_a_truncation_and_statistics_count_it():
    envs = ppo.make_envs(ppo.Config(max_episode_steps=5, eval_max_steps=5, frame_skip=1), num_envs=2)
    envs.reset(seed=1)
    steps = [envs.step(np.zeros(2, int)) for _ in range(11)]
    ends = [index for index, step in enumerate(steps) if step[3].any()]
    assert ends == [4, 10]  # step 5 is the reset
    assert not any(step[2].any() for step in steps)
    assert [*envs.return_queue] == pytest.approx([0.5] * 4) and [*envs.length_queue] == [5] * 4
    assert [*envs.unwrapped.score_queue] == [0] * 4
    envs.close()


def test_threads_give_what_gymnasiums_sync_vector_env_gives():
    def make_env():
        return gym.wrappers.TimeLimit(ppo.FlappyPixels(2), 40)

    ended, scores = 0, []
    threaded, sync = ppo.ThreadedVectorEnv([make_env] * 3), gym.vector.SyncVectorEnv([make_env] * 3)
    assert np.array_equal(threaded.reset(seed=7)[0], sync.reset(seed=7)[0])
    for actions in np.array(some_flaps(300)).reshape(100, 3):
        ours, theirs = threaded.step(actions), sync.step(actions)
        for mine, reference in zip(ours[:4], theirs[:4]):
            assert np.array_equal(mine, reference)
        assert np.array_equal(ours[4]["score"], theirs[4]["score"])
        ended += int((ours[2] | ours[3]).sum())
        scores += theirs[4]["score"][theirs[2] | theirs[3]].tolist()
    assert ended > 3 and [*threaded.score_queue] == scores
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


@pytest.mark.parametrize("max_episode_steps, ends", [(20_000, (3, None)), (7, (3, None)), (20_000, (7, 9))])
def test_an_agent_that_never_ends_is_cut_whichever_flag_cuts_it_and_scores_are_of_its_first_game(
    monkeypatch, max_episode_steps, ends
):
    def make_envs(config, num_envs):
        def make_env(length):
            return gym.wrappers.TimeLimit(EndsAt(length), config.max_episode_steps)

        return ppo.ThreadedVectorEnv([partial(make_env, length) for length in ends])

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    monkeypatch.setattr(ppo, "ActorCritic", SmallNetwork)
    params = SmallNetwork(2).init(jax.random.key(0), np.zeros((1, 84, 84, 4), np.uint8))
    config = ppo.Config(eval_max_steps=7, max_episode_steps=max_episode_steps)
    found = ppo.evaluate(config, params, episodes=2, seed=1)
    assert found["capped"].tolist() == [False, True]
    lengths = [ends[0], 7]
    assert found["lengths"].tolist() == lengths and found["returns"].tolist() == lengths
    assert found["scores"].tolist() == lengths  # not the score of the game that began after the reset


def test_the_line_of_an_evaluation_has_the_pipes_and_what_was_cut(tmp_path, monkeypatch, capsys):
    found = dict(returns=[1.0, 3.0, 5.0], lengths=[4, 5, 6], scores=[0, 0, 3], capped=[False, False, True])
    found = {name: np.array(x) for name, x in found.items()}
    monkeypatch.setattr(ppo, "evaluate", lambda *args: found)
    summary = ppo.report(ppo.Config(eval_max_steps=1500), None, tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert "greedy return over 3 episodes: 3.0 +- 1.6, 1 pipes" in line
    assert "1 cut at 1,500 steps (--eval-max-steps)" in line
    assert (summary["eval_score_mean"], summary["eval_capped"]) == (1.0, 1)


def test_two_updates_with_the_real_network_end_to_end(tmp_path):
    config = tiny(ppo, num_steps=40, total_frames=160, update_epochs=1, eval_max_steps=6, run_dir=tmp_path / "run")
    result = ppo.train(config)
    rows = read_metrics(config.run_dir)
    assert [row["frames"] for row in rows] == ["80", "160"]
    assert float(rows[0]["charts/episodic_score"]) >= 0 and float(rows[0]["charts/episodic_length"]) > 1
    assert {"eval_score_mean", "eval_return_mean", "eval_capped", "sps"} <= set(result)
    assert any("flappy" in name for name in result["versions"])
    with Image.open(tmp_path / "run" / "agent.gif") as image:
        assert image.size == (144, 256) and image.n_frames > 1
