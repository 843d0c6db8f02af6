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
from conftest import Counter, Draw, counter, tiny

import ppo_cartpole as ppo


def params_for(config, preference=0.0):
    """Parameters of a policy whose logit of action 1 is always `preference` above that of action 0."""
    envs = ppo.make_envs(config, 1)
    params = ppo.make_network(envs).init(jax.random.key(0), jnp.zeros(envs.observation_space.shape))
    bias = jnp.float32([0.0, preference])  # of the policy; all else is 0
    return jax.tree.map(lambda x: bias if x.shape == (2,) else jnp.zeros_like(x), params)


def test_every_episode_is_whole_and_counted_once():
    # araffin/rl-baselines-zoo#90
    config = tiny(env_id=counter(3))
    result = ppo.evaluate(config, params_for(config), 5, seed=0)
    assert result.returns.tolist() == [3.0] * 5
    assert result.lengths.tolist() == [3] * 5
    assert result.capped.tolist() == [False] * 5


def test_short_episodes_are_not_preferred(monkeypatch):
    # DLR-RM/stable-baselines3#402: the first 10 to finish would all be of length 1.
    def make_envs(config, num_envs):
        envs = gym.vector.SyncVectorEnv([partial(Counter, (1, 19)[n % 2]) for n in range(num_envs)])
        return gym.wrappers.vector.RecordEpisodeStatistics(envs)

    params = params_for(tiny(env_id=counter(3)))
    monkeypatch.setattr(ppo, "make_envs", make_envs)
    result = ppo.evaluate(tiny(), params, 10, seed=0)
    assert result.returns.tolist() == [1.0, 19.0] * 5
    assert result.lengths.tolist() == [1, 19] * 5


@pytest.mark.parametrize("preference, action", [(0.01, 1.0), (-0.01, 0.0)])
def test_the_most_likely_action_is_taken(preference, action):
    config = tiny(env_id=counter(15, reward="action"))
    result = ppo.evaluate(config, params_for(config, preference), 4, seed=0)
    assert result.returns.tolist() == [15 * action] * 4


def test_an_episode_that_does_not_end_is_cut_and_reported():
    config = tiny(env_id=counter(100), eval_max_steps=7)
    result = ppo.evaluate(config, params_for(config), 3, seed=0)
    assert result.lengths.tolist() == [7] * 3
    assert result.capped.tolist() == [True] * 3
    assert result.summary()["eval_capped"] == 3
    assert "3 capped" in str(result)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_episode_that_ends_by_itself_is_not_capped(end):
    config = tiny(env_id=counter(7, end), eval_max_steps=7)
    result = ppo.evaluate(config, params_for(config), 3, seed=0)
    assert result.lengths.tolist() == [7] * 3
    assert not result.capped.any()
    assert "capped" not in str(result)


def test_returns_are_of_the_rewards_of_the_environment():
    config = tiny(env_id=counter(3), gamma=0.5, reward_scale=0.01)
    assert ppo.evaluate(config, params_for(config), 2, seed=0).returns.tolist() == [3.0] * 2


def test_the_seed_decides():
    config = tiny(env_id="Draw-v0")
    one, again, two = (ppo.evaluate(config, params_for(config), 4, seed).returns.tolist() for seed in (1, 1, 2))
    assert one == again
    assert not set(one) & set(two)
    assert len(set(one)) == 4


def test_no_seed_of_training_is_used():
    config = tiny(env_id="Draw-v0")
    Draw.seeds.clear()
    ppo.evaluate(config, params_for(config), 20, seed=1)
    training = {ppo.env_seed(1, update) + n for update in range(1000) for n in range(64)}
    assert len(Draw.seeds) == 20
    assert not training & set(Draw.seeds)


def test_summary():
    result = ppo.Evaluation(np.array([1.0, 3.0]), np.array([1, 3]), np.array([False, True]))
    keys = ("eval_return_mean", "eval_return_std", "eval_episodes", "eval_capped")
    assert result.summary() == dict(zip(keys, (2.0, 1.0, 2, 1)))
    json.dumps(result.summary())


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def evaluated(cartpole_run, tmp_path_factory):
    """(directory, digests of the run before) of one --evaluate, started with --run-dir."""
    config, _ = cartpole_run
    before, run_dir = digests(config.run_dir), tmp_path_factory.mktemp("evaluated") / "evaluation"
    args = ["--evaluate", config.run_dir, "--run-dir", str(run_dir), "--eval-episodes", "3", "--seed", "7"]
    assert ppo.main(args) == 0
    return run_dir, before


def test_evaluating_a_run_leaves_its_directory_alone(cartpole_run, evaluated):
    assert digests(cartpole_run[0].run_dir) == evaluated[1]


def test_evaluating_a_run_writes_to_a_directory_of_its_own(evaluated):
    run_dir, _ = evaluated
    assert sorted(path.name for path in run_dir.iterdir()) == ["agent.gif", "evaluation.json"]
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert set(evaluation) == {"eval_return_mean", "eval_return_std", "eval_episodes", "eval_capped"}
    assert evaluation["eval_episodes"] == 3


def test_evaluating_a_run_repeats_its_own_evaluation(cartpole_run, tmp_path, monkeypatch, capsys):
    # Without --run-dir: into runs/, wherever the run itself is.
    config, result = cartpole_run
    monkeypatch.chdir(tmp_path)
    assert ppo.main(["--evaluate", config.run_dir]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{result['eval_return_mean']:.1f}" in line
    (path,) = Path("runs").glob("*/evaluation.json")
    assert json.loads(path.read_text()) == {key: x for key, x in result.items() if key.startswith("eval_")}


def test_an_evaluation_does_not_overwrite_another(evaluated, cartpole_run, capsys):
    run_dir, _ = evaluated
    assert ppo.main(["--evaluate", cartpole_run[0].run_dir, "--run-dir", str(run_dir)]) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_a_failed_picture_does_not_stop_a_run(tmp_path, capsys):
    config = tiny(env_id=counter(3))  # cannot render
    ppo.record_gif(config, params_for(config), tmp_path / "agent.gif", seed=0)
    assert "agent.gif" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
