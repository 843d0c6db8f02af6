"""The checkpoint and --resume: bit-equal states, whole curves, damaged files, full disks, Ctrl-C and SIGKILL."""

import ast
import errno
import json
import os
import random
import resource
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
from conftest import (
    FRAMES,
    ROOT,
    Stop,
    assert_same,
    counter,
    die_in,
    events_of,
    frames_of,
    load_state,
    only_cartpole,
    read_metrics,
    tiny,
    without_times,
)

import ppo_cartpole as ppo


@pytest.fixture
def run_copy(script, finished, tmp_path):
    """(config, directory) of a copy of the finished run, without its result.json: one that died at its very end."""
    run_dir = tmp_path / "copy"
    shutil.copytree(finished[0].run_dir, run_dir)
    (run_dir / "result.json").unlink()
    return finished[0], run_dir


def train_state(script, config, actions=2, seed=0):
    obs = np.zeros((1, 4) if script is ppo else (1, 84, 84, 4), np.float32)
    state = script.init_state(script.ActorCritic(actions), script.make_optimizer(config), obs, seed)
    return state._replace(update=jnp.int32(seed))


@only_cartpole
def test_a_state_survives_its_file(script, tmp_path):
    # Denys88/rl_games#173: moments and counters of the optimizer too. google/flax#1550: types as they were.
    config = tiny(script)
    state, optimizer = train_state(script, config, seed=7), script.make_optimizer(config)
    _, opt_state = optimizer.update(state.params, state.opt_state, state.params)
    state = state._replace(opt_state=opt_state)
    script.save_checkpoint(tmp_path, state, 12.5)
    loaded, seconds = script.load_checkpoint(tmp_path, train_state(script, config))
    assert_same(loaded, state)
    assert seconds == 12.5
    assert jax.random.uniform(loaded.key) == jax.random.uniform(state.key)
    optimizer.update(loaded.params, loaded.opt_state, loaded.params)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.msgpack"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_cut_in_two_leaves_the_old_file(tmp_path, monkeypatch, function):
    # Lightning-AI/pytorch-lightning#688
    def stop(*args):
        raise Stop

    path = tmp_path / "file"
    ppo.write_atomically(path, b"old content")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(os, function, stop)
        ppo.write_atomically(path, b"x" * 100)
    assert path.read_bytes() == b"old content"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file.tmp").write_bytes(b"half of what a SIGKILL left behind, and longer than what comes")
    ppo.write_atomically(path, b"new content")
    assert path.read_bytes() == b"new content" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", os.fstat(fd).st_size)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append(("replace", 0)), replace(*paths)))
    ppo.write_atomically(tmp_path / "file", b"x" * 100_000)
    assert calls == [("fsync", 100_000), ("replace", 0)]


def test_a_resumed_run_starts_from_the_saved_state(script, tmp_path, monkeypatch):
    config, saved, started = tiny(script, run_dir=tmp_path / "run"), [], []
    save, play = script.save_checkpoint, script.rollout

    def copy(state):
        return jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key)))

    def note_save(run_dir, state, seconds):
        saved.append(copy(state))
        save(run_dir, state, seconds)

    def note_start(config, act_fn, envs, state, *rest):
        started.append(copy(state))
        return play(config, act_fn, envs, state, *rest)

    monkeypatch.setattr(script, "save_checkpoint", note_save)
    die_in(script, config, "save_checkpoint", at=2)
    monkeypatch.setattr(script, "rollout", note_start)
    assert script.main(["--resume", config.run_dir]) == 0
    jax.tree.map(np.testing.assert_array_equal, saved[1], started[0])
    assert int(started[0].update) == 4
    assert len(started) == 2  # updates 5 and 6


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    # hill-a/stable-baselines#301. A rollout is one whole episode here, so a new episode changes nothing.
    config = tiny(env_id=counter(3), run_dir=tmp_path / "whole")
    ppo.train(config)
    parts = tiny(env_id=counter(3), run_dir=tmp_path / "parts")
    die_in(ppo, parts, "save_checkpoint", at=1)
    assert ppo.main(["--resume", parts.run_dir]) == 0
    assert_same(load_state(ppo, parts.run_dir, config), load_state(ppo, config.run_dir, config))
    assert without_times(read_metrics(parts.run_dir)) == without_times(read_metrics(config.run_dir))


@pytest.mark.parametrize("script, name, at, kept", [
    ("cartpole", "rollout", 2, 0),  # before the first checkpoint: the run starts again
    ("cartpole", "save_checkpoint", 1, 2),  # just after a checkpoint
    ("cartpole", "record", 3, 2),  # after the row of update 3, which no checkpoint has
    ("cartpole", "record", 4, 2),  # after the row of update 4, just before its checkpoint
    ("atari", "rollout", 2, 0),
    ("atari", "record", 4, 2),
    ("cartpole", "record", 6, 4),  # after the last row, just before its checkpoint
], indirect=["script"])  # fmt: skip
def test_the_curve_has_no_gap_and_no_repeat(script, tmp_path, name, at, kept):
    # DLR-RM/stable-baselines3#433
    config = tiny(script, run_dir=tmp_path / "run")
    die_in(script, config, name, at, owner=script.Recorder if name == "record" else None)
    before = read_metrics(config.run_dir)[:kept]
    assert script.main(["--resume", config.run_dir]) == 0
    rows = read_metrics(config.run_dir)
    assert frames_of(config.run_dir) == FRAMES
    assert rows[:kept] == before
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    rates = [float(row["charts/learning_rate"]) for row in rows]  # the schedule goes on
    np.testing.assert_allclose(rates, config.learning_rate * (1 - np.arange(6) / 6), rtol=1e-4)


@only_cartpole  # as Recorder is the same in all
@pytest.mark.parametrize("at", [3, 5])
def test_tensorboard_shows_a_resumed_run_without_repeats_as_metrics_csv_does(script, tmp_path, at):
    # Killed after row `at`; the checkpoint is from row 2. What of the first attempt came after it is gone.
    config = tiny(script, checkpoint_every=2, run_dir=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        save, saved = script.save_checkpoint, []
        patch.setattr(script, "save_checkpoint", lambda *args: saved.append(saved or save(*args)))
        die_in(script, config, "record", at, owner=script.Recorder)
    assert script.main(["--resume", config.run_dir]) == 0
    rows, events = read_metrics(config.run_dir), events_of(config.run_dir)
    for tag in ("losses/entropy", "charts/SPS", "charts/episodic_return"):
        steps = [int(row["frames"]) for row in rows if row[tag]]
        assert [step for step, _ in events.get(tag, [])] == steps, tag


@only_cartpole
def test_half_a_row_is_dropped(run_copy):
    config, run_dir = run_copy
    with open(run_dir / "metrics.csv", "a") as file:
        file.write("38")
    assert ppo.main(["--resume", str(run_dir)]) == 0
    assert without_times(read_metrics(run_dir)) == without_times(read_metrics(config.run_dir))


def test_a_run_that_died_in_its_evaluation_is_completed_wherever_it_is_moved(script, run_copy, monkeypatch):
    # apax-hub/apax#465: relative paths are fine too.
    config, run_dir = run_copy
    before = (run_dir / "checkpoint.msgpack").read_bytes()
    monkeypatch.chdir(run_dir.parent)
    assert script.main(["--resume", "copy"]) == 0
    result, original = (json.loads(Path(folder, "result.json").read_text()) for folder in (run_dir, config.run_dir))
    assert result["eval_return_mean"] == original["eval_return_mean"]
    assert result["frames"] == original["frames"]
    assert (run_dir / "checkpoint.msgpack").read_bytes() == before
    assert frames_of(run_dir) == FRAMES


def test_a_finished_run_says_so_and_stays_as_it_is(finished, command):
    config, result = finished
    files = {path: path.stat().st_mtime_ns for path in Path(config.run_dir).rglob("*")}
    code, lines, errors = command("--resume", config.run_dir)
    assert (code, errors) == (0, [])
    assert "finished" in lines[-1]
    assert {path: path.stat().st_mtime_ns for path in Path(config.run_dir).rglob("*")} == files


def test_a_resumed_run_gets_other_episodes(tmp_path):
    config = tiny(env_id="Draw-v0", run_dir=tmp_path / "run")
    die_in(ppo, config, "save_checkpoint", at=1)
    assert ppo.main(["--resume", config.run_dir]) == 0
    returns = [row["charts/episodic_return"] for row in read_metrics(config.run_dir)]
    assert len(set(returns)) == len(returns)


def damage(path, how):
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"empty": b"", "short": data[:20], "half": data[:middle], "flipped": flipped}[how])


@only_cartpole
@pytest.mark.parametrize("how", ["empty", "short", "half", "flipped"])
def test_a_damaged_checkpoint_is_refused_in_one_line(script, refused, run_copy, how):
    _, run_dir = run_copy
    damage(run_dir / "checkpoint.msgpack", how)
    for option in ("--resume", "--evaluate"):
        line = refused(option, run_dir)
        assert str(run_dir / "checkpoint.msgpack") in line and "damaged" in line


@pytest.mark.parametrize("script, change", [
    ("cartpole", "shape"), ("cartpole", "layer"), ("cartpole", "optimizer"), ("atari", "layer"),
], indirect=["script"])  # fmt: skip
def test_a_checkpoint_of_another_network_or_optimizer_is_refused_in_one_line(script, refused, run_copy, change):
    config, run_dir = run_copy
    state = load_state(script, run_dir, config)
    if change == "shape":
        state = train_state(script, config, actions=9)
    elif change == "layer":
        layers = {**state.params["params"]}
        layers["another"] = layers.pop(next(iter(layers)))
        state = state._replace(params={"params": layers})
    else:
        state = state._replace(opt_state=(state.opt_state, ()))
    script.save_checkpoint(run_dir, state, 0.0)
    assert str(run_dir / "checkpoint.msgpack") in refused("--resume", run_dir)


def test_a_full_disk_is_said_in_one_line_and_leaves_the_last_checkpoint_good(script, command, tmp_path, monkeypatch):
    # The second checkpoint finds no room, like any file of more than 100 bytes.
    config, save = tiny(script, run_dir=tmp_path / "run"), script.save_checkpoint
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_in_a_small_room(run_dir, state, seconds):
        size = 100 if int(state.update) == 4 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            save(run_dir, state, seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(script, "save_checkpoint", save_in_a_small_room)
    code, _, (line,) = command(config=config)
    assert code == 1
    assert os.strerror(errno.EFBIG) in line and "checkpoint.msgpack" in line and f"--resume {config.run_dir}" in line
    assert int(load_state(script, config.run_dir, config).update) == 2
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_directory_that_goes_away_is_said_in_one_line(script, command, tmp_path, monkeypatch):
    config, save = tiny(script, run_dir=tmp_path / "run"), script.save_checkpoint

    def save_after_rm(run_dir, state, seconds):
        if int(state.update) == 4:
            shutil.rmtree(run_dir)
        save(run_dir, state, seconds)

    monkeypatch.setattr(script, "save_checkpoint", save_after_rm)
    code, _, (line,) = command(config=config)
    assert code == 1 and str(tmp_path / "run") in line and "No such file" in line
    assert not (tmp_path / "run").exists()


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
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, error


def check_files(run_dir, config):
    """Every file of a run is readable; returns the update of the checkpoint."""
    lines = (run_dir / "metrics.csv").read_text().splitlines(keepends=True)
    whole = [line.split(",") for line in lines if line.endswith("\n")]
    assert len({len(cells) for cells in whole}) == 1
    assert [int(cells[0]) for cells in whole[1:]] == [8 * (n + 1) for n in range(len(whole) - 1)]
    assert ppo.load_config(run_dir).num_envs == 2
    # A SIGKILL loses at most the point of a row just written, and one cut in two is no obstacle.
    steps = [step for step, _ in events_of(run_dir)["losses/entropy"]]
    assert steps == [8 * (n + 1) for n in range(len(steps))]
    assert len(whole) - 2 <= len(steps) <= len(whole) - 1
    update = int(load_state(ppo, run_dir, config).update)
    assert len(whole) - 1 - 3 <= update <= len(whole) - 1  # a checkpoint every 3 updates
    return update


def kill_and_resume(run_dir, kills, seed):
    """Kill a run `kills` times at random moments and once by SIGTERM, resume after each, and finish it."""
    rng, updates = random.Random(seed), 40 * (kills + 2)
    config = tiny(total_frames=8 * updates)
    started_with = f"--total-frames {8 * updates} --checkpoint-every 3 --run-dir {run_dir} {SETTINGS}".split()
    process, rows = started(*started_with), 0
    for number in [signal.SIGKILL] * kills + [signal.SIGTERM]:
        code, error = stop_after(process, run_dir, rows + rng.randint(4, 20), rng.random() * 0.02, number)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), error
        if number == signal.SIGTERM:
            assert f"--resume {run_dir}" in error and error.count("\n") == 1
        rows = check_files(run_dir, config)
        process = started("--resume", str(run_dir))
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert check_files(run_dir, config) == updates == rows_written(run_dir)
    assert (run_dir / "result.json").exists()


def test_killed_and_terminated_runs_are_resumed(tmp_path):
    kill_and_resume(tmp_path / "run", kills=1, seed=0)


@pytest.mark.slow
def test_ten_kills(tmp_path):
    kill_and_resume(tmp_path / "run", kills=10, seed=1)
