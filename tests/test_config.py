"""The command line: what is refused, in one line that names the flag, and what is taken."""

import dataclasses
import json
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, Odd, tiny
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import ppo_cartpole as ppo

vector, two = Box(-1, 1, (3,)), Discrete(2)
for name, spaces in {
    "OddContinuous": (vector, Box(-1, 1, (2,))),
    "OddDict": (Dict(x=vector), two),
    "OddImage": (Box(0, 255, (8, 8), np.uint8), two),
    "OddDiscreteObs": (Discrete(4), two),
    "OddMultiDiscrete": (vector, MultiDiscrete([2, 2])),
    "OddStart": (vector, Discrete(2, start=1)),
}.items():
    gym.register(f"{name}-v0", entry_point=Odd, kwargs=dict(zip(("observation_space", "action_space"), spaces)))
gym.register("OddMissing-v0", entry_point="a_package_that_is_not_installed:Env")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(*args) runs a command line that has to fail, and returns its one line on stderr."""

    def run(*args):
        before = sorted(tmp_path.rglob("*"))
        assert ppo.main(list(args)) == 2
        assert sorted(tmp_path.rglob("*")) == before  # no run directory is left behind
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize("flag, value", [
    ("--total-frames", "0"), ("--total-frames", "-5"), ("--num-envs", "0"), ("--num-envs", "-1"),
    ("--num-steps", "0"), ("--num-minibatches", "0"), ("--num-minibatches", "-2"), ("--update-epochs", "0"),
    ("--checkpoint-every", "0"),
    ("--eval-episodes", "0"), ("--eval-max-steps", "0"), ("--learning-rate", "-0.001"), ("--learning-rate", "0"),
    ("--learning-rate", "nan"), ("--learning-rate", "inf"), ("--gamma", "1.01"), ("--gamma", "-0.1"),
    ("--gae-lambda", "2"), ("--gae-lambda", "nan"), ("--clip-coef", "0"), ("--clip-coef", "-0.2"),
    ("--vf-coef", "-1"), ("--ent-coef", "-0.01"), ("--ent-coef", "inf"), ("--max-grad-norm", "0"),
    ("--reward-scale", "0"), ("--seed", "-1"), ("--seed", "4294967296"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(refused, flag, value):
    # jax-ml/jax#4745: a seed beyond 32 bits would silently be another one.
    assert flag in refused(flag, value)


def test_rows_that_do_not_divide_are_refused_with_both_numbers(refused):
    # DLR-RM/stable-baselines3 PR#270
    line = refused("--num-envs", "3", "--num-steps", "5", "--num-minibatches", "4")
    assert "--num-minibatches 4" in line
    assert "15" in line


def test_more_minibatches_than_rows_are_refused(refused):
    assert "--num-minibatches" in refused("--num-envs", "2", "--num-steps", "2", "--num-minibatches", "8")


def test_a_budget_below_one_update_is_refused(refused):
    # micdoh/XLRON#18: never "finished" without an update.
    assert "--total-frames 100" in refused("--total-frames", "100")


@pytest.mark.parametrize("env_id", [
    "OddContinuous-v0", "OddDict-v0", "OddImage-v0", "OddDiscreteObs-v0", "OddMultiDiscrete-v0", "OddStart-v0",
])  # fmt: skip
def test_unsuitable_spaces_are_refused(refused, env_id):
    line = refused("--env-id", env_id)
    assert env_id in line
    assert "Box" in line or "Discrete" in line


def test_pendulum_is_refused(refused):
    # google-research/batch-ppo#22
    assert "Discrete" in refused("--env-id", "Pendulum-v1")


@pytest.mark.parametrize("env_id", [
    "CartPoole-v1", "CartPole-v99", "nowhere/CartPole-v1", "OddMissing-v0", "", "a:b:c",
])  # fmt: skip
def test_environments_that_cannot_be_made_are_refused(refused, env_id):
    assert "--env-id" in refused("--env-id", env_id)


def test_an_unknown_environment_is_answered_with_a_suggestion(refused):
    assert "CartPole" in refused("--env-id", "CartPoole-v1")


def test_an_environment_without_autoreset_mode_next_step_is_refused(refused):
    # Farama-Foundation/Gymnasium PR#1227
    class SameStep(gym.vector.VectorEnv):
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        single_observation_space = observation_space = vector
        single_action_space = action_space = two

        def __init__(self, num_envs, **kwargs):
            self.num_envs = num_envs

    entry_points = dict(entry_point=Odd, vector_entry_point=SameStep)
    gym.register("SameStep-v0", **entry_points, kwargs=dict(observation_space=vector, action_space=two))
    try:
        assert "NEXT_STEP" in refused("--env-id", "SameStep-v0")
    finally:
        del gym.registry["SameStep-v0"]


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_run_that_is_not_there_is_refused(refused, option):
    assert "nothing/here" in refused(option, "nothing/here")


@pytest.mark.filterwarnings("ignore:The field:UserWarning")  # the parser's, about the same
@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"gamma": 0.9, "no_such_field": 1}', '{"seed": "one"}', '{"gamma": null}',
])  # fmt: skip
@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_damaged_config_is_refused(refused, tmp_path, option, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(content)
    assert "run" in refused(option, "run")


def test_resume_and_evaluate_exclude_each_other(refused):
    line = refused("--resume", "a", "--evaluate", "b")
    assert "--resume" in line and "--evaluate" in line


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_the_settings_of_a_run_cannot_be_changed_later(refused, cartpole_run, option):
    assert "--gamma" in refused(option, cartpole_run[0].run_dir, "--gamma", "0.5")


def test_a_directory_that_holds_a_run_is_refused(refused, cartpole_run):
    config, _ = cartpole_run
    assert "--run-dir" in refused("--run-dir", config.run_dir)


def test_a_run_directory_that_cannot_be_is_refused(refused):
    assert "--run-dir" in refused("--run-dir", "x" * 300)


def test_a_run_directory_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "--run-dir" in refused("--run-dir", "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("args", [
    ["--total-frames", "1e7"], ["--no-such-flag"], ["--anneal", "False"], ["--num-envs"],
])  # fmt: skip
def test_what_the_parser_does_not_understand_exits_with_2(capsys, args):
    # brentyi/tyro#48
    with pytest.raises(SystemExit) as exit:
        ppo.main(args)
    assert exit.value.code == 2
    assert args[-1] in capsys.readouterr().err


def test_flags_set_their_fields():
    args = "--total_frames 5000 --no-anneal --learning-rate 1e-4 --seed 4294967295"
    config = ppo.parse_args(args.split())
    assert config == ppo.Config(total_frames=5000, anneal=False, learning_rate=1e-4, seed=2**32 - 1)


def test_no_flags_give_the_defaults():
    assert ppo.parse_args([]) == ppo.Config()


def test_defaults_are_accepted():
    ppo.check_config(ppo.Config())


def test_frames_are_rounded_down_to_whole_updates():
    config = tiny(total_frames=10_000, num_envs=32, num_steps=32)
    assert config.batch_size == 1024
    assert config.num_updates == 9


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        ppo.main(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(ppo.Config):
        assert field.name.replace("_", "-") in text


def test_config_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ppo.Config().seed = 2


def test_config_survives_its_file(cartpole_run):
    config, _ = cartpole_run
    assert ppo.load_config(config.run_dir) == config
    with open(f"{config.run_dir}/config.json") as file:
        assert json.load(file) == dataclasses.asdict(config)


def test_a_bad_flag_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, str(ROOT / "ppo_cartpole.py"), "--env-id", "Pendulum-v1"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: --env-id Pendulum-v1")
    assert list(tmp_path.iterdir()) == []
