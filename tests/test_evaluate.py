"""evaluate and --evaluate: whole episodes, one environment each, greedy, capped, and apart from training."""

import hashlib
import json
from functools import partial
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Counter, Draw, counter, every_script, only_cartpole, tiny

import ppo_cartpole as ppo


def params_for(config, preference=0.0):
    """Parameters of a policy whose logit of action 1 is always `preference` above that of action 0."""
    shape = ppo.make_envs(config, 1).observation_space.shape
    params = jax.eval_shape(ppo.ActorCritic(2).init, jax.random.key(0), jax.ShapeDtypeStruct(shape, np.float32))
    bias = jnp.float32([0.0, preference])  # of the policy; all else is 0
    return jax.tree.map(lambda x: bias if x.shape == (2,) else jnp.zeros(x.shape), params)


def evaluate(episodes, preference=0.0, seed=0, **settings):
    """(returns, lengths, capped) as lists, of Counter(3) unless settings name another environment."""
    config = tiny(**{"env_id": counter(3)} | settings)
    return [x.tolist() for x in ppo.evaluate(config, params_for(config, preference), episodes, seed).values()]


def test_every_episode_is_whole_and_counted_once_with_the_rewards_of_the_environment():
    # araffin/rl-baselines-zoo#90
    assert evaluate(5, gamma=0.5, reward_scale=0.01) == [[3.0] * 5, [3] * 5, [False] * 5]
    config = tiny(env_id=counter(3))
    assert list(ppo.evaluate(config, params_for(config), 5, 0)) == ["returns", "lengths", "capped"]


def test_short_episodes_are_not_preferred(monkeypatch):
    # DLR-RM/stable-baselines3#402: the first 10 to finish would all be of length 1.
    def make_envs(config, num_envs):
        envs = gym.vector.SyncVectorEnv([partial(Counter, (1, 19)[n % 2]) for n in range(num_envs)])
        return gym.wrappers.vector.RecordEpisodeStatistics(envs)

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    assert evaluate(10) == [[1.0, 19.0] * 5, [1, 19] * 5, [False] * 10]


@pytest.mark.parametrize("preference, action", [(0.01, 1.0), (-0.01, 0.0)])
def test_the_most_likely_action_is_taken(preference, action):
    assert evaluate(5, preference, env_id=counter(15, reward="action"))[0] == [15 * action] * 5


def test_an_episode_that_does_not_end_is_cut_and_reported():
    assert evaluate(5, env_id=counter(100), eval_max_steps=7) == [[7.0] * 5, [7] * 5, [True] * 5]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_episode_that_ends_by_itself_is_not_capped(end):
    assert evaluate(5, env_id=counter(7, end), eval_max_steps=7) == [[7.0] * 5, [7] * 5, [False] * 5]


def test_the_seed_decides():
    one, again, two = (evaluate(5, seed=seed, env_id="Draw-v0")[0] for seed in (1, 1, 2))
    assert one == again
    assert not set(one) & set(two)
    assert len(set(one)) == 5


def test_no_seed_of_training_is_used():
    Draw.seeds.clear()
    evaluate(5, seed=1, env_id="Draw-v0")
    training = {ppo.env_seed(1, update) + n for update in range(1000) for n in range(64)}
    assert len(Draw.seeds) == 5
    assert not training & set(Draw.seeds)


@only_cartpole
@pytest.mark.parametrize("max_steps, line", [
    (20, "greedy return over 5 episodes: 9.0 +- 0.0"),
    (7, "greedy return over 5 episodes: 7.0 +- 0.0, 5 cut at 7 steps (--eval-max-steps)"),
])  # fmt: skip
def test_the_line_of_an_evaluation_says_at_how_many_steps_it_was_cut_and_which_flag_moves_that(
    script, tmp_path, capsys, max_steps, line
):
    config = tiny(env_id=counter(9), eval_episodes=5, eval_max_steps=max_steps)
    found = ppo.report(config, params_for(config), tmp_path)
    (found_line,) = capsys.readouterr().out.splitlines()
    assert found_line.startswith(line) and ("cut" in found_line) == (max_steps < 9)
    names = "eval_return_mean", "eval_return_std", "eval_episodes", "eval_capped"
    assert found == dict(zip(names, (min(9.0, max_steps), 0.0, 5, 5 * (max_steps < 9))))
    json.dumps(found)


class NoPictures(Counter):
    metadata = {"render_modes": []}


class UnknownRenderMode(Counter):
    def __init__(self):
        super().__init__()


gym.register("NoPictures-v0", entry_point=NoPictures)
gym.register("UnknownRenderMode-v0", entry_point=UnknownRenderMode)


@pytest.mark.parametrize("env_id", ["NoPictures-v0", "UnknownRenderMode-v0", counter(3)])
def test_where_an_environment_gives_no_pictures_one_line_says_why(tmp_path, capsys, recwarn, env_id):
    config = tiny(env_id=env_id)
    assert ppo.report(config, params_for(config), tmp_path)["eval_return_mean"] == 3.0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no agent.gif: ") and len(line) > 30
    assert not [str(warning.message) for warning in recwarn if "render" in str(warning.message)]
    assert list(tmp_path.iterdir()) == []


@every_script
def test_a_failed_picture_does_not_stop_a_run(script, finished, command, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no room for\npictures")

    monkeypatch.setattr(script.Image.Image, "save", fail)
    args = ["--evaluate", finished[0].run_dir, "--run-dir", tmp_path / "new", "--eval-max-steps", 3]
    code, _, (line,) = command(*args)
    assert code == 0 and line.startswith("no agent.gif: ") and "no room" in line
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["evaluation.json"]


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in Path(folder).rglob("*") if path.is_file()}


def test_evaluating_a_run_writes_to_a_directory_of_its_own_once(finished, command, refused, tmp_path):
    config, _ = finished
    before, run_dir = digests(config.run_dir), tmp_path / "evaluation"
    args = ["--evaluate", config.run_dir, "--run-dir", run_dir, "--seed", 7, "--eval-max-steps", 9]
    assert command(*args)[0] == 0
    assert digests(config.run_dir) == before
    assert sorted(path.name for path in run_dir.iterdir()) == ["agent.gif", "evaluation.json"]
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert {"eval_return_mean", "eval_return_std", "eval_episodes", "eval_capped"} <= set(evaluation)
    assert evaluation["eval_episodes"] == 2
    assert "--run-dir" in refused(*args)


@every_script
def test_evaluating_a_run_repeats_its_own_evaluation(finished, command, tmp_path, monkeypatch):
    # Without --run-dir: into runs/, wherever the run itself is.
    config, result = finished
    monkeypatch.chdir(tmp_path)
    code, lines, errors = command("--evaluate", config.run_dir)
    assert (code, errors) == (0, [])
    assert any(f"{result['eval_return_mean']:.1f}" in line for line in lines)
    (path,) = Path("runs").glob("*/evaluation.json")
    assert json.loads(path.read_text()) == {key: x for key, x in result.items() if key.startswith("eval_")}
