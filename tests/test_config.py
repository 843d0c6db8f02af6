"""Config and the command line: what is refused, in one line that names the flag, and what is taken."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest
from conftest import ROOT, Odd, every_script, only_cartpole, tiny
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


@pytest.mark.parametrize("name, value", [
    ("total_frames", 0), ("total_frames", -5), ("total_frames", 1.5), ("num_envs", 0), ("num_envs", -1),
    ("num_steps", 0), ("num_minibatches", 0), ("num_minibatches", -2), ("update_epochs", 0), ("checkpoint_every", 0),
    ("eval_episodes", 0), ("eval_max_steps", 0), ("learning_rate", -0.001), ("learning_rate", 0),
    ("learning_rate", float("nan")), ("learning_rate", float("inf")), ("learning_rate", "fast"), ("gamma", 1.01),
    ("gamma", -0.1), ("gae_lambda", 2), ("gae_lambda", float("nan")), ("gae_lambda", -0.5), ("clip_coef", 0),
    ("clip_coef", -0.2), ("vf_coef", -1), ("ent_coef", -0.01), ("ent_coef", float("inf")), ("max_grad_norm", 0),
    ("reward_scale", 0), ("seed", -1), ("seed", 2**32), ("seed", 2.5), ("seed", None), ("anneal", 1), ("env_id", 3),
    ("run_dir", 3), ("gamma", True),
])  # fmt: skip
@only_cartpole
def test_values_out_of_range_or_of_another_kind_are_refused(script, name, value):
    # jax-ml/jax#4745: a seed beyond 32 bits would silently be another one.
    with pytest.raises(script.UsageError, match="--" + name.replace("_", "-")) as error:
        script.Config(**{name: value})
    assert "<class" not in str(error.value)  # in words that a person would use


@only_cartpole
def test_values_that_importers_have_at_hand_are_taken_for_what_they_are(script, tmp_path):
    config = script.Config(
        run_dir=Path("runs/a"), seed=np.int64(3), learning_rate=np.float32(1e-3), total_frames=np.float64(1e7),
        gamma=1, anneal=np.bool_(False), num_envs=np.uint8(4),
    )  # fmt: skip
    found = (config.run_dir, config.seed, config.learning_rate, config.total_frames, config.gamma, config.anneal)
    assert found == ("runs/a", 3, float(np.float32(1e-3)), 10_000_000, 1.0, False)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    assert script.load_config(tmp_path) == config


@pytest.mark.parametrize("flag, value", [
    ("--total-frames", "0"), ("--total-frames", "1.5"), ("--total-frames", "1e7.5"), ("--total-frames", "many"),
    ("--total-frames", "nan"), ("--seed", "-1"), ("--seed", "4294967296"), ("--learning-rate", "0"),
    ("--learning-rate", "nan"), ("--num-envs", "1e400"),
])  # fmt: skip
@only_cartpole
def test_bad_flags_are_refused_in_one_line(script, refused, flag, value):
    assert flag in refused(flag, value)


@only_cartpole
def test_whole_numbers_may_be_written_as_people_type_them(script):
    assert script.parse_args(["--total-frames", "1e7"]).total_frames == 10_000_000
    assert script.parse_args(["--total-frames", "1E6", "--seed", "7"]).total_frames == 1_000_000
    assert type(script.parse_args(["--total-frames", "1e7"]).total_frames) is int


@only_cartpole
def test_rows_that_do_not_divide_are_refused_with_both_numbers(script, refused):
    # DLR-RM/stable-baselines3 PR#270
    line = refused("--num-envs", 3, "--num-steps", 5, "--num-minibatches", 4)
    assert "--num-minibatches 4" in line
    assert "15" in line or "--num-steps 5" in line


@only_cartpole
def test_more_minibatches_than_rows_are_refused(script, refused):
    assert "--num-minibatches" in refused("--num-envs", 2, "--num-steps", 2, "--num-minibatches", 8)


@only_cartpole
def test_a_budget_below_one_update_is_refused(script, refused):
    # micdoh/XLRON#18: never "finished" without an update.
    assert "--total-frames 100" in refused("--total-frames", 100)


@only_cartpole
@pytest.mark.parametrize("env_id", [
    "OddContinuous-v0", "OddDict-v0", "OddImage-v0", "OddDiscreteObs-v0", "OddMultiDiscrete-v0", "OddStart-v0",
    "Pendulum-v1",
])  # fmt: skip
def test_unsuitable_spaces_are_refused(script, refused, env_id):
    # google-research/batch-ppo#22
    line = refused("--env-id", env_id)
    assert env_id in line
    assert "Box" in line and "Discrete" in line


@pytest.mark.parametrize("script, env_id, words", [
    ("cartpole", "CartPoole-v1", "CartPole"), ("cartpole", "CartPole-v99", "v1"),
    ("cartpole", "nowhere/CartPole-v1", ""), ("cartpole", "OddMissing-v0", ""), ("cartpole", "", ""),
    ("cartpole", "a:b:c", ""), ("flappy", "FlapyBird-v0", "FlappyBird-v0"), ("atari", "ALE/Pongg-v5", "`Pong`"),
    ("atari", "breakout", "ALE/<Game>-v5"), ("atari", "Breakout-v5", "ALE/<Game>-v5"),
    ("atari", "ALE/Pong-v4", "ALE/<Game>-v5"), ("atari", "CartPole-v1", "ALE/<Game>-v5"),
], indirect=["script"])  # fmt: skip
def test_environments_that_cannot_be_made_are_refused_with_a_suggestion(script, refused, env_id, words):
    line = refused("--env-id", env_id)
    assert "--env-id" in line and words in line


@pytest.mark.parametrize("script, args, words", [
    ("flappy", "--eval-max-steps 100 --max-episode-steps 99", "--max-episode-steps"),
    ("atari", "--num-envs 8 --num-steps 10 --num-minibatches 4", "--num-minibatches 4"),
    ("atari", "--repeat-action-probability 1.5", "--repeat-action-probability"),
    ("atari", "--process-id 0", "--distributed"), ("atari", "--distributed --num-processes 2", "--distributed"),
], indirect=["script"])  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(script, refused, args, words):
    assert words in refused(*args.split())


@only_cartpole
def test_an_environment_without_autoreset_mode_next_step_is_refused(script, refused):
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


@pytest.mark.parametrize("platforms, reason", [("cuda", "no CUDA here"), ("nonsense", "unknown backend")])
def test_a_device_that_is_not_there_is_said_in_one_line_before_anything_is_written(
    script, refused, monkeypatch, platforms, reason
):
    def devices(*args):
        raise RuntimeError(f"Unable to initialize backend '{platforms}':\n{reason}")

    monkeypatch.setattr(jax, "devices", devices)
    line = refused("--run-dir", "run")
    assert platforms in line and reason in line and "JAX_PLATFORMS" in line


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_run_that_is_not_there_is_refused(script, refused, option):
    assert "nothing/here" in refused(option, "nothing/here")


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_file_where_a_run_is_expected_is_answered_with_what_to_name(script, refused, finished, option):
    path = f"{finished[0].run_dir}/checkpoint.msgpack"
    line = refused(option, path)
    assert path in line and "directory of a run" in line


@pytest.mark.filterwarnings("ignore:The field:UserWarning")  # the parser's, about the same
@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"gamma": 0.9, "no_such_field": 1}', '{"seed": "one"}', '{"gamma": null}',
])  # fmt: skip
@only_cartpole
def test_a_damaged_config_is_refused(script, refused, tmp_path, content):
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "config.json").write_text(content)
    for option in ("--resume", "--evaluate"):
        assert "my-run" in refused(option, "my-run")


def test_resume_and_evaluate_exclude_each_other(script, refused, finished):
    run_dir = finished[0].run_dir
    assert "--resume" in refused("--resume", run_dir, "--evaluate", run_dir)


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_the_settings_of_a_run_cannot_be_changed_later(script, refused, finished, option):
    assert "--gamma" in refused(option, finished[0].run_dir, "--gamma", "0.5")
    assert "--num-envs" in refused(option, finished[0].run_dir, "--num-envs", "4")


def test_a_directory_that_holds_a_run_is_refused(script, refused, finished):
    line = refused("--run-dir", finished[0].run_dir)
    assert "--run-dir" in line and f"--resume {finished[0].run_dir}" in line


@only_cartpole
@pytest.mark.parametrize("name", ["x" * 300, "file", "file/run"])
def test_a_run_directory_that_cannot_be_is_refused(script, refused, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    assert name in refused("--run-dir", name)


@only_cartpole
def test_two_runs_that_begin_in_the_same_second_get_directories_of_two_names(script, monkeypatch):
    monkeypatch.setattr(script.time, "strftime", lambda *args: "20260101-000000")
    first, second, third = (script.make_run_dir(script.Config()) for _ in range(3))
    assert len({first, second, third}) == 3 and all(path.is_dir() for path in (first, second, third))
    assert all(script.__name__ in path.name and "seed1" in path.name for path in (first, second, third))


def test_a_run_that_another_process_trains_is_refused_and_left_alone(script, refused, finished, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(Path(finished[0].run_dir, "config.json").read_bytes())
    with script.lock_run(tmp_path / "run"):
        assert "another process" in refused("--resume", "run")
        assert "--run-dir" in refused("--run-dir", "run")


@only_cartpole
@pytest.mark.parametrize("args", [["--no-such-flag"], ["--anneal", "False"], ["--num-envs"]])
def test_what_the_parser_does_not_understand_exits_with_2(script, capsys, args):
    # brentyi/tyro#48
    with pytest.raises(SystemExit) as exit:
        script.main(args)
    assert exit.value.code == 2
    assert args[-1] in capsys.readouterr().err


@every_script
def test_flags_set_their_fields(script):
    args = "--total_frames 50000 --no-anneal --learning-rate 1e-4 --seed 4294967295"
    config = script.parse_args(args.split())
    assert config == script.Config(total_frames=50000, anneal=False, learning_rate=1e-4, seed=2**32 - 1)
    assert script.parse_args([]) == script.Config()


def test_frames_are_rounded_down_to_whole_updates():
    config = tiny(total_frames=10_000, num_envs=32, num_steps=32)
    assert config.batch_size == 1024
    assert config.num_updates == 9


@every_script
def test_help_explains_every_flag(script, capsys):
    with pytest.raises(SystemExit) as exit:
        script.main(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(script.Config):
        assert field.name.replace("_", "-") in text


def test_config_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ppo.Config().seed = 2


@every_script
def test_config_survives_its_file(script, finished):
    config, _ = finished
    assert script.load_config(config.run_dir) == config
    assert json.loads(Path(config.run_dir, "config.json").read_text()) == dataclasses.asdict(config)


@pytest.mark.parametrize("variables, args, words", [
    ({}, ["--env-id", "Pendulum-v1"], "--env-id Pendulum-v1"),
    ({"JAX_PLATFORMS": "nonsense"}, ["--run-dir", "run"], "nonsense"),
])  # fmt: skip
def test_bad_input_to_a_process_of_its_own(tmp_path, monkeypatch, variables, args, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, str(ROOT / "ppo_cartpole.py"), *args]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert list(tmp_path.iterdir()) == []
