"""A whole run: its files, its determinism, its end by numbers that are not finite, and what it compiles."""

import ast
import json
import math
import resource
import subprocess
import sys
from collections import Counter as Tally
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, Draw, assert_same, counter, load_state, read_metrics, tiny, without_times
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_cartpole as ppo

COLUMNS = """frames,seconds,charts/episodic_return,charts/episodic_length,charts/SPS,charts/learning_rate,
charts/clip_coef,losses/policy_loss,losses/value_loss,losses/entropy,losses/approx_kl,losses/clip_fraction,
losses/explained_variance""".replace("\n", "").split(",")


def test_files(cartpole_run):
    run_dir = Path(cartpole_run[0].run_dir)
    names = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*")}
    event_files = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(event_files) == 1
    assert names - event_files == {
        "config.json", "metrics.csv", "result.json", "agent.gif",
        "checkpoints", "checkpoints/00000004.msgpack", "checkpoints/00000006.msgpack",
    }  # fmt: skip


def test_metrics_have_one_row_per_update(cartpole_run):
    config, _ = cartpole_run
    rows = read_metrics(config.run_dir)
    assert list(rows[0]) == COLUMNS
    assert [int(row["frames"]) for row in rows] == [64, 128, 192, 256, 320, 384]


def test_metrics_are_numbers_in_their_ranges(cartpole_run):
    for row in read_metrics(cartpole_run[0].run_dir):
        x = {name: float(cell) for name, cell in row.items() if cell}
        assert all(math.isfinite(value) for value in x.values())
        assert x["charts/SPS"] > 0 and x["seconds"] > 0
        assert 0 < x["losses/entropy"] <= math.log(2) + 1e-6
        assert x["losses/approx_kl"] >= 0
        assert 0 <= x["losses/clip_fraction"] <= 1
        assert x["losses/explained_variance"] <= 1
        assert x["charts/episodic_return"] == x["charts/episodic_length"] >= 8  # CartPole pays 1 a step


def test_tensorboard_has_the_numbers_of_metrics_csv(cartpole_run):
    config, _ = cartpole_run
    events = EventAccumulator(config.run_dir).Reload()
    assert set(events.Tags()["scalars"]) == set(COLUMNS) - {"frames", "seconds"}
    for tag in events.Tags()["scalars"]:
        table = {int(row["frames"]): float(row[tag]) for row in read_metrics(config.run_dir) if row[tag]}
        points = {event.step: event.value for event in events.Scalars(tag)}
        assert points == pytest.approx(table, rel=1e-4)


def test_a_cell_without_an_episode_is_empty(tmp_path):
    config = tiny(env_id=counter(5), run_dir=str(tmp_path / "run"))
    ppo.train(config)
    cells = [(row["charts/episodic_return"], row["charts/episodic_length"]) for row in read_metrics(config.run_dir)]
    # Counter(5) ends at steps 5, 11, 17 and 23; updates are 4 steps.
    assert cells == [("", ""), ("5", "5"), ("5", "5"), ("", ""), ("5", "5"), ("5", "5")]
    events = EventAccumulator(config.run_dir).Reload()
    assert [event.step for event in events.Scalars("charts/episodic_return")] == [16, 24, 40, 48]


def test_result(cartpole_run):
    config, result = cartpole_run
    assert json.loads(Path(config.run_dir, "result.json").read_text()) == result
    keys = "env_id seed frames seconds sps eval_return_mean eval_return_std eval_episodes eval_capped versions device"
    assert list(result) == keys.split()
    assert (result["env_id"], result["seed"], result["frames"]) == ("CartPole-v1", 3, 384)
    assert result["eval_episodes"] == 2
    assert set(result["versions"]) == {"jax", "flax", "optax", "gymnasium"}
    assert result["versions"]["jax"] == jax.__version__


def test_the_result_is_that_of_evaluate(cartpole_run):
    config, result = cartpole_run
    params = load_state(config.run_dir, config).params
    assert ppo.evaluate(config, params, 2, config.seed).summary()["eval_return_mean"] == result["eval_return_mean"]


def test_the_gif_moves(cartpole_run):
    with Image.open(Path(cartpole_run[0].run_dir, "agent.gif")) as gif:
        assert gif.n_frames > 1


def test_the_same_seed_gives_the_same_run_whatever_the_evaluation(cartpole_run, tmp_path):
    config, _ = cartpole_run
    settings = dict(num_envs=4, num_steps=16, total_frames=6 * 64 + 5, seed=3, run_dir=str(tmp_path / "run"))
    again = tiny(**settings, eval_episodes=3, eval_max_steps=9, checkpoint_every=5)
    ppo.train(again)
    assert without_times(read_metrics(again.run_dir)) == without_times(read_metrics(config.run_dir))
    assert_same(load_state(again.run_dir, again), load_state(config.run_dir, config))


def test_another_seed_gives_another_run(cartpole_run, tmp_path):
    config, _ = cartpole_run
    settings = dict(num_envs=4, num_steps=16, total_frames=6 * 64, seed=4)
    other = tiny(**settings, run_dir=str(tmp_path / "run"))
    ppo.train(other)
    for row, other_row in zip(read_metrics(config.run_dir), read_metrics(other.run_dir)):
        assert row["losses/value_loss"] != other_row["losses/value_loss"]


def test_runs_of_neighbouring_seeds_share_no_episode(tmp_path):
    used = []
    for seed in (1, 2):
        Draw.seeds.clear()
        ppo.train(tiny(env_id="Draw-v0", seed=seed, run_dir=str(tmp_path / str(seed))))
        used += Draw.seeds
    # 2 environments of training, 2 of the evaluation; the picture shows the first of those again.
    assert len(used) == 10
    assert len(set(used)) == 8


def test_a_run_without_a_name_goes_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ppo.train(tiny(env_id=counter(3), total_frames=8))
    (run_dir,) = Path("runs").iterdir()
    assert "ppo_cartpole" in run_dir.name and "seed1" in run_dir.name


@pytest.mark.parametrize("dtype", ["float64", "uint8", "int64"])
def test_observations_may_have_any_dtype(tmp_path, dtype):
    config = tiny(env_id=counter(3, dtype=dtype), total_frames=16, run_dir=str(tmp_path / "run"))
    assert ppo.train(config)["eval_return_mean"] == 3.0


def test_one_row_per_update_trains(tmp_path):
    # DLR-RM/stable-baselines3#265: the deviation of a single advantage.
    shape = dict(num_envs=1, num_steps=1, num_minibatches=1, total_frames=3)
    config = tiny(**shape, env_id=counter(3), run_dir=str(tmp_path / "run"))
    ppo.train(config)
    assert [row["frames"] for row in read_metrics(config.run_dir)] == ["1", "2", "3"]


def test_a_reward_that_is_not_finite_stops_the_run(tmp_path, capsys, monkeypatch):
    # Counter(5) pays NaN in step 5: update 2, after the checkpoint of update 1.
    config = tiny(env_id=counter(5, reward="nan"), checkpoint_every=1, run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(ppo, "parse_args", lambda args: config)
    assert ppo.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not finite" in line
    state = load_state(config.run_dir, config)
    assert int(state.update) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert not (tmp_path / "run" / "result.json").exists()
    assert len(read_metrics(config.run_dir)) == 2


def test_reward_scale_changes_the_learner_and_not_the_reports(tmp_path):
    rows = []
    for scale in (1.0, 0.5):
        config = tiny(env_id=counter(3), total_frames=16, reward_scale=scale, run_dir=str(tmp_path / str(scale)))
        assert ppo.train(config)["eval_return_mean"] == 3.0
        rows.append(read_metrics(config.run_dir)[0])
    assert [row["charts/episodic_return"] for row in rows] == ["3", "3"]
    assert float(rows[1]["losses/value_loss"]) < float(rows[0]["losses/value_loss"])


def test_nothing_is_compiled_after_the_first_update(tmp_path, monkeypatch):
    compiled, after_update = Tally(), []
    record = ppo.Recorder.record

    def listener(event, duration, **kwargs):
        compiled.update([event] if "/compile/" in event else [])

    def note(*args):
        record(*args)
        after_update.append(dict(compiled))

    monkeypatch.setattr(ppo.Recorder, "record", note)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        ppo.train(tiny(num_envs=3, num_minibatches=3, total_frames=72, run_dir=str(tmp_path / "run")))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(after_update) == 6
    assert sum(after_update[0].values()) > 0
    assert after_update == [after_update[0]] * 6


def test_sps_counts_the_frames_of_this_process(tmp_path, monkeypatch):
    # Stoix#130, mesozoic-labs PR#369: on a clock of 1 second per rollout, SPS is the frames of a rollout.
    now, rollout, save = [0.0], ppo.rollout, ppo.save_checkpoint
    clock = {name: getattr(ppo.time, name) for name in ("time", "strftime", "sleep")}
    monkeypatch.setattr(ppo, "time", SimpleNamespace(**clock, monotonic=lambda: now[0]))

    def rollout_of_a_second(*args):
        now[0] += 1.0
        return rollout(*args)

    def save_and_stop(*args):
        save(*args)
        raise RuntimeError

    monkeypatch.setattr(ppo, "rollout", rollout_of_a_second)
    config = tiny(run_dir=str(tmp_path / "run"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(ppo, "save_checkpoint", save_and_stop)
        ppo.train(config)
    assert ppo.main(["--resume", config.run_dir]) == 0
    rows = read_metrics(config.run_dir)
    assert [float(row["charts/SPS"]) for row in rows] == [8.0] * 6
    assert [float(row["seconds"]) for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_clock_that_stands_still_is_no_division_by_zero(tmp_path, monkeypatch):
    clock = {name: getattr(ppo.time, name) for name in ("time", "strftime", "sleep")}
    monkeypatch.setattr(ppo, "time", SimpleNamespace(**clock, monotonic=lambda: 5.0))
    ppo.train(tiny(env_id=counter(3), run_dir=str(tmp_path / "run")))


def test_a_process_of_its_own_with_default_environment(tmp_path):
    # From another directory, into a relative one, without a terminal: plain lines, and nothing on stderr.
    settings = "--num-envs 2 --num-steps 4 --num-minibatches 2 --update-epochs 2 --total-frames 50"
    settings += " --eval-episodes 2 --eval-max-steps 20 --run-dir here/run"
    command = [sys.executable, "-W", "error::RuntimeWarning", str(ROOT / "ppo_cartpole.py"), *settings.split()]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "48 frames" in process.stdout.splitlines()[0]
    assert "greedy return over 2 episodes" in process.stdout.splitlines()[-1]
    assert (tmp_path / "here" / "run" / "result.json").exists()


def test_nothing_happens_at_import():
    statements = ast.parse((ROOT / "ppo_cartpole.py").read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef)
    assert isinstance(statements[-1], ast.If)  # if __name__ == "__main__"
    assert all(isinstance(statement, allowed) for statement in statements[1:-1])


@pytest.mark.slow
def test_1000_updates_need_no_more_memory_than_100(tmp_path, monkeypatch):
    peaks, record = [], ppo.Recorder.record

    def note(*args):
        record(*args)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    monkeypatch.setattr(ppo.Recorder, "record", note)
    ppo.train(tiny(total_frames=8 * 1000, run_dir=str(tmp_path / "run")))
    assert peaks[-1] - peaks[100] < 20 * 1024  # KiB
