"""Checkpoints and --resume: bit-equal states, whole curves, damaged files, Ctrl-C and SIGKILL."""

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_same, counter, leaves, load_state, read_metrics, tiny, without_times
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import ppo_cartpole as ppo


@pytest.fixture(autouse=True)
def event_files_sorted_by_age(monkeypatch):
    # TensorBoard reads a run's files in the order of their names, which end in the second and a count of this
    # process. Within a second 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


class Stop(BaseException):
    """Stands for a SIGKILL: nothing in the script catches it."""


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """stopped(config, method, owner, at) trains until the at-th call of a function has returned, then dies there."""

    def run(config, name, at, owner=ppo):
        function, calls = getattr(owner, name), []

        def dying(*args, **kwargs):
            result = function(*args, **kwargs)
            calls.append(None)
            if len(calls) == at:
                raise Stop
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            with pytest.raises(Stop):
                ppo.train(config)

    return run


@pytest.fixture
def run_copy(cartpole_run, tmp_path):
    """(config, directory) of a copy of the finished run, without its result.json: one that died at its very end."""
    run_dir = tmp_path / "copy"
    shutil.copytree(cartpole_run[0].run_dir, run_dir)
    (run_dir / "result.json").unlink()
    return cartpole_run[0], run_dir


def resume(run_dir):
    return ppo.main(["--resume", str(run_dir)])


def checkpoints(run_dir):
    return sorted(Path(run_dir, "checkpoints").iterdir())


def frames_of(run_dir):
    return [int(row["frames"]) for row in read_metrics(run_dir)]


def events_of(run_dir):
    """{tag: {step: value}} of the TensorBoard files of a run."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def train_state(config, obs_size=4, actions=2, seed=0):
    network = ppo.ActorCritic(actions)
    state = ppo.init_state(network, ppo.make_optimizer(config), np.zeros((1, obs_size), np.float32), seed)
    return state._replace(update=jnp.int32(seed))


def test_a_state_survives_its_file(tmp_path):
    # Denys88/rl_games#173: moments and counters of the optimizer too. google/flax#1550: types as they were.
    config = tiny()
    state = train_state(config, seed=7)
    optimizer = ppo.make_optimizer(config)
    _, opt_state = optimizer.update(state.params, state.opt_state, state.params)
    state = state._replace(opt_state=opt_state)
    ppo.save_checkpoint(tmp_path, state, 12.5)
    loaded, seconds = ppo.load_checkpoint(tmp_path, train_state(config))
    assert_same(loaded, state)
    assert seconds == 12.5
    assert jax.random.uniform(loaded.key) == jax.random.uniform(state.key)
    optimizer.update(loaded.params, loaded.opt_state, loaded.params)


def test_the_two_newest_checkpoints_are_kept(tmp_path):
    for number in (2, 4, 6, 8):
        ppo.save_checkpoint(tmp_path, train_state(tiny(), seed=number), 0.0)
    assert [path.name for path in checkpoints(tmp_path)] == ["00000006.msgpack", "00000008.msgpack"]


@pytest.mark.parametrize("length", [5, 100])
def test_a_write_cut_in_two_leaves_the_old_file(tmp_path, monkeypatch, length):
    # Lightning-AI/pytorch-lightning#688
    path = tmp_path / "file"
    ppo.write_atomically(path, b"old content")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        ppo.write_atomically(path, b"x" * length)
    assert path.read_bytes() == b"old content"


def test_a_resumed_run_starts_from_the_saved_state(tmp_path, monkeypatch, stopped):
    config, saved, started = tiny(run_dir=str(tmp_path / "run")), [], []
    save, record = ppo.save_checkpoint, ppo.rollout

    def note_save(run_dir, state, seconds):
        saved.append(jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key))))
        save(run_dir, state, seconds)

    def note_start(config, act_fn, envs, state, *rest):
        started.append(jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key))))
        return record(config, act_fn, envs, state, *rest)

    monkeypatch.setattr(ppo, "save_checkpoint", note_save)
    stopped(config, "save_checkpoint", at=2)
    monkeypatch.setattr(ppo, "rollout", note_start)
    assert resume(config.run_dir) == 0
    jax.tree.map(np.testing.assert_array_equal, saved[1], started[0])
    assert int(started[0].update) == 4
    assert len(started) == 2  # updates 5 and 6


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, stopped):
    # hill-a/stable-baselines#301. A rollout is one whole episode here, so a new episode changes nothing.
    config = tiny(env_id=counter(3), run_dir=str(tmp_path / "whole"))
    ppo.train(config)
    parts = tiny(env_id=counter(3), run_dir=str(tmp_path / "parts"))
    stopped(parts, "save_checkpoint", at=1)
    assert resume(parts.run_dir) == 0
    assert_same(load_state(parts.run_dir, config), load_state(config.run_dir, config))
    assert without_times(read_metrics(parts.run_dir)) == without_times(read_metrics(config.run_dir))


@pytest.mark.parametrize("name, at, owner, kept", [
    ("save_checkpoint", 1, ppo, 2),  # just after a checkpoint
    ("record", 3, ppo.Recorder, 2),  # after the row of update 3, which no checkpoint has
    ("record", 4, ppo.Recorder, 2),  # after the row of update 4, just before its checkpoint
    ("rollout", 5, ppo, 4),
])  # fmt: skip
def test_the_curve_has_no_gap_and_no_repeat(tmp_path, stopped, name, at, owner, kept):
    # DLR-RM/stable-baselines3#433
    config = tiny(run_dir=str(tmp_path / "run"))
    stopped(config, name, at, owner)
    before = read_metrics(config.run_dir)[:kept]
    assert resume(config.run_dir) == 0
    assert frames_of(config.run_dir) == [8, 16, 24, 32, 40, 48]
    assert read_metrics(config.run_dir)[:kept] == before
    seconds = [float(row["seconds"]) for row in read_metrics(config.run_dir)]
    assert seconds == sorted(seconds)
    for steps in events_of(config.run_dir)["charts/learning_rate"], events_of(config.run_dir)["losses/entropy"]:
        assert list(steps) == [8, 16, 24, 32, 40, 48]


def test_the_schedules_go_on(tmp_path, stopped):
    config = tiny(learning_rate=1.0, run_dir=str(tmp_path / "run"))
    stopped(config, "save_checkpoint", at=1)
    resume(config.run_dir)
    rates = [float(row["charts/learning_rate"]) for row in read_metrics(config.run_dir)]
    np.testing.assert_allclose(rates, 1 - np.arange(6) / 6, rtol=1e-4)


def test_half_a_row_is_dropped(run_copy):
    config, run_dir = run_copy
    with open(run_dir / "metrics.csv", "a") as file:
        file.write("38")
    assert resume(run_dir) == 0
    assert without_times(read_metrics(run_dir)) == without_times(read_metrics(config.run_dir))


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path, stopped):
    config = tiny(run_dir=str(tmp_path / "run"))
    stopped(config, "rollout", at=2)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert resume(config.run_dir) == 0
    assert frames_of(config.run_dir) == [8, 16, 24, 32, 40, 48]


def test_a_run_that_died_in_its_evaluation_is_completed(run_copy):
    config, run_dir = run_copy
    before = leaves(load_state(run_dir, config))
    assert resume(run_dir) == 0
    result, original = (json.loads(Path(folder, "result.json").read_text()) for folder in (run_dir, config.run_dir))
    assert result["eval_return_mean"] == original["eval_return_mean"]
    assert result["frames"] == original["frames"]
    for leaf, other in zip(before, leaves(load_state(run_dir, config))):
        np.testing.assert_array_equal(leaf, other)


def test_a_finished_run_says_so_and_stays_as_it_is(cartpole_run, capsys):
    config, result = cartpole_run
    files = {path: path.stat().st_mtime_ns for path in Path(config.run_dir).rglob("*")}
    assert resume(config.run_dir) == 0
    assert "finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path(config.run_dir).rglob("*")} == files


def test_a_resumed_run_gets_other_episodes(tmp_path, stopped):
    config = tiny(env_id="Draw-v0", run_dir=str(tmp_path / "run"))
    stopped(config, "save_checkpoint", at=1)
    resume(config.run_dir)
    returns = [row["charts/episodic_return"] for row in read_metrics(config.run_dir)]
    assert len(set(returns)) == len(returns)


def damage(path, how):
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"empty": b"", "short": data[:20], "half": data[:middle], "flipped": flipped}[how])


@pytest.mark.parametrize("how", ["empty", "short", "half", "flipped"])
def test_a_damaged_newest_checkpoint_is_passed_over(run_copy, capsys, how):
    config, run_dir = run_copy
    older, newest = checkpoints(run_dir)
    damage(newest, how)
    assert int(load_state(run_dir, config).update) == int(older.stem)
    assert newest.name in capsys.readouterr().err


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(run_copy):
    config, run_dir = run_copy
    damage(checkpoints(run_dir)[-1], "half")
    assert resume(run_dir) == 0
    assert frames_of(run_dir) == frames_of(config.run_dir)
    assert read_metrics(run_dir)[:4] == read_metrics(config.run_dir)[:4]


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_only_damaged_checkpoints_are_refused_in_one_line(run_copy, tmp_path, capsys, option):
    config, run_dir = run_copy
    for path in checkpoints(run_dir):
        damage(path, "half")
    target = [] if option == "--resume" else ["--run-dir", str(tmp_path / "new")]
    assert ppo.main([option, str(run_dir), *target]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run_dir) in line
    assert not (tmp_path / "new").exists()
    assert frames_of(run_dir) == frames_of(config.run_dir)


@pytest.mark.parametrize("sizes", [dict(actions=3), dict(obs_size=6)])
def test_a_checkpoint_of_other_shapes_is_refused_in_one_line(run_copy, capsys, sizes):
    config, run_dir = run_copy
    ppo.save_checkpoint(run_dir, train_state(config, **sizes, seed=7), 0.0)
    assert resume(run_dir) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "00000007.msgpack" in line


def test_a_checkpoint_of_other_layers_is_refused_in_one_line(run_copy, capsys):
    config, run_dir = run_copy
    state = train_state(config, seed=7)
    layers = {**state.params["params"]}
    layers["another"] = layers.pop(next(iter(layers)))
    ppo.save_checkpoint(run_dir, state._replace(params={"params": layers}), 0.0)
    assert resume(run_dir) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "00000007.msgpack" in line


def test_a_run_may_be_moved(run_copy, tmp_path, monkeypatch):
    # apax-hub/apax#465: relative paths are fine too.
    _, run_dir = run_copy
    monkeypatch.chdir(tmp_path)
    checkpoints(run_dir)[-1].unlink()
    assert resume("copy") == 0
    assert (run_dir / "result.json").exists()


def test_a_run_killed_while_it_wrote_its_first_checkpoint_begins_again(tmp_path, stopped):
    config = tiny(run_dir=str(tmp_path / "run"))
    stopped(config, "record", 1, ppo.Recorder)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "00000002.msgpack.tmp").write_bytes(b"half")
    assert resume(config.run_dir) == 0
    assert frames_of(config.run_dir) == [8, 16, 24, 32, 40, 48]


def test_an_interrupt_in_the_last_update_leaves_the_evaluation_to_resume(tmp_path, monkeypatch):
    config, rollout = tiny(run_dir=str(tmp_path / "run")), ppo.rollout

    def interrupted(config, act_fn, envs, state, *rest):
        if int(state.update) == 5:
            signal.raise_signal(signal.SIGTERM)
        return rollout(config, act_fn, envs, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ppo, "rollout", interrupted)
        patch.setattr(ppo, "parse_args", lambda args: config)
        assert ppo.main() == 130
    assert frames_of(config.run_dir)[-1] == 48 and not (tmp_path / "run" / "result.json").exists()
    assert resume(config.run_dir) == 0
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_update_saves_and_exits_with_130(tmp_path, monkeypatch, capsys, number):
    config, handler = tiny(checkpoint_every=100, run_dir=str(tmp_path / "run")), signal.getsignal(number)
    original, rollouts = ppo.rollout, []

    def interrupted(*args):
        rollouts.append(None)
        if len(rollouts) == 3:
            signal.raise_signal(number)
        return original(*args)

    monkeypatch.setattr(ppo, "rollout", interrupted)
    monkeypatch.setattr(ppo, "parse_args", lambda args: config)
    assert ppo.main() == 130
    assert f"--resume {config.run_dir}" in capsys.readouterr().err
    assert frames_of(config.run_dir) == [8, 16, 24]
    assert int(load_state(config.run_dir, config).update) == 3
    assert not (tmp_path / "run" / "result.json").exists()
    assert signal.getsignal(number) is handler


def test_no_file_is_read_with_pickle():
    for script in ROOT.glob("ppo_*.py"):
        tree = ast.parse(script.read_text())
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch"}
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        assert "allow_pickle" not in keywords


SETTINGS = "--num-envs 2 --num-steps 4 --num-minibatches 2 --update-epochs 2 --eval-episodes 2 --eval-max-steps 20"


def started(*args):
    command = [sys.executable, str(ROOT / "ppo_cartpole.py"), *args]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def rows_written(run_dir):
    path = run_dir / "metrics.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def stop_after(process, run_dir, rows, delay, number):
    """Send a signal `delay` seconds after metrics.csv has reached `rows` rows; returns the exit code and stderr."""
    try:
        while process.poll() is None and rows_written(run_dir) < rows:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, error


def check_files(run_dir, config):
    """Every file of a run is readable; returns the update of the newest checkpoint."""
    lines = (run_dir / "metrics.csv").read_text().splitlines(keepends=True)
    whole = [line.split(",") for line in lines if line.endswith("\n")]
    assert all(len(cells) == len(ppo.COLUMNS) for cells in whole)
    assert [int(cells[0]) for cells in whole[1:]] == [8 * (n + 1) for n in range(len(whole) - 1)]
    assert ppo.load_config(run_dir).num_envs == 2
    steps = list(events_of(run_dir)["charts/SPS"])
    assert steps == sorted(set(steps))
    assert len(steps) >= len(whole) - 2
    update = int(load_state(run_dir, config).update)
    assert update <= len(whole) - 1
    return update


def kill_and_resume(run_dir, kills, seed):
    """Kill a run `kills` times at random moments and once by Ctrl-C, resume after each, and finish it."""
    rng, updates = random.Random(seed), 40 * (kills + 2)
    config = tiny(total_frames=8 * updates)
    started_with = f"--total-frames {8 * updates} --checkpoint-every 3 --run-dir {run_dir} {SETTINGS}".split()
    process, rows = started(*started_with), 0
    for number in [signal.SIGKILL] * kills + [signal.SIGINT]:
        code, error = stop_after(process, run_dir, rows + rng.randint(4, 20), rng.random() * 0.02, number)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), error
        assert "Traceback" not in error
        rows = rows_written(run_dir)
        update = check_files(run_dir, config)
        assert update > rows - 2 * 3 if number == signal.SIGKILL else update == rows
        process = started("--resume", str(run_dir))
        rows = update
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert check_files(run_dir, config) == updates == rows_written(run_dir)
    assert (run_dir / "result.json").exists()


def test_killed_and_interrupted_runs_are_resumed(tmp_path):
    kill_and_resume(tmp_path / "run", kills=1, seed=0)


@pytest.mark.slow
def test_ten_kills(tmp_path):
    kill_and_resume(tmp_path / "run", kills=10, seed=1)
