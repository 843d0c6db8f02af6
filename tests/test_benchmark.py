"""The programs in benchmark/: statistics, the verdicts of check.py and its calibration, tables, faults."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import ppo_cartpole as ppo

sys.path.insert(0, str(ROOT / "benchmark"))

# Not by import statements: these are no packages that the tests need.
check, faults, plot, reference, run = map(import_module, ("check", "faults", "plot", "reference", "run"))

SETTINGS = {"env_id": "CartPole-v1", "total_frames": 50_000, "learning_rate": 0.1}
VERSIONS = {"jax": "0.10.2", "gymnasium": "1.4.0"}


def synthetic(seed, factor=1.0, speed=1.0, heavy=False):
    """A Run that learns from a return of 20 to about 400 * factor, with noise of its own."""
    rng = np.random.default_rng(seed)
    frames = np.arange(1, 51) * 1000
    noise = rng.standard_t(2) if heavy else rng.normal()
    returns = 20 + (380 * factor + 15 * noise) / (1 + np.exp(-(frames * speed - 15_000 + 1500 * rng.normal()) / 4000))
    returns += 8 * rng.normal(size=50)
    result = {
        "eval_return_mean": min(500.0, 420 * factor + 20 * rng.normal()),
        "frames": 50_000,
        "seconds": 3.0,
        "eval_greedy": True,  # no number, though Python counts with it
    }
    return reference.Run(f"seed {seed}", seed, frames, {"episodic_return": returns}, result, SETTINGS, VERSIONS)


def write_run(run_dir, run, **changes):
    """The files of a run directory that check.py reads."""
    run_dir.mkdir(parents=True)
    config = run.settings | {"seed": run.seed, "run_dir": "x", "resume": None} | changes
    rows = [f"{frames},{x:.6g}\n" for frames, x in zip(run.frames, run.columns["episodic_return"])]
    (run_dir / "metrics.csv").write_text("frames,charts/episodic_return\n" + "".join(rows))
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "result.json").write_text(json.dumps(run.result | {"versions": run.versions}))
    return run_dir


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """A folder of reference curves, made by run.keep_curves from 20 synthetic runs."""
    root = tmp_path_factory.mktemp("reference")
    run_dirs = {seed: write_run(root / f"runs/{seed}", synthetic(seed), seed=seed) for seed in range(1, 21)}
    run.keep_curves("ppo_cartpole", "", (), SETTINGS, run_dirs, root / "curves")
    return root / "curves"


def answer_of(arguments, capsys):
    """(exit code, JSON answer) of check.py."""
    code = check.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# --------------------------------------------------------------------------------------------- statistics


def test_interquartile_mean_by_hand():
    assert reference.interquartile_mean([8, 1, 100, 4, 2, 7, 3, -50]) == (2 + 3 + 4 + 7) / 4
    assert reference.interquartile_mean([3, 1, 2]) == 2  # a quarter of 3 is no whole seed
    np.testing.assert_array_equal(reference.interquartile_mean([[0, 9], [1, 1], [3, 2], [90, 4]]), [2, 3])


def test_bootstrap_interval_covers():
    # Normal data, so the truth is 0. A percentile interval from 20 numbers is a little short.
    rng = np.random.default_rng(0)
    intervals = [reference.bootstrap_interval([rng.normal(size=20)], draws=200) for _ in range(150)]
    covered = np.mean([low <= 0 <= high for low, high in intervals])
    assert 0.86 <= covered <= 0.99


def test_bootstrap_draws_within_strata():
    # Two environments of constant return: nothing varies unless seeds are drawn across environments.
    low, high = reference.bootstrap_interval([np.full(5, 1.0), np.full(5, 9.0)], draws=50)
    assert low == high == 5.0


def test_statistics_of_a_straight_line():
    frames, returns = np.arange(1, 101) * 10, np.arange(1, 101.0)
    line = synthetic(0)._replace(frames=frames, columns={"episodic_return": returns})
    assert reference.final_return(line) == np.mean(range(91, 101))
    assert reference.area(line) == 50.5
    assert reference.frames_to(line, 50) == 520  # the mean of 48..52 is 50
    assert reference.frames_to(line, 200) == 2000  # never


def test_gaps_are_filled_from_before():
    nan = math.nan
    assert reference.filled(np.array([nan, 2, nan, nan, 5, nan])).tolist() == [2, 2, 2, 2, 5, 5]
    with pytest.raises(reference.NotComparable, match="no episode"):
        reference.filled(np.full(3, nan))


def test_compact_takes_means_of_what_is_there():
    frames, means = reference.compact(
        np.array([1, 2, 3, 4, 5]), np.array([1, 3, math.nan, math.nan, 7.0]), max_rows=3
    )
    assert frames.tolist() == [2, 4, 5]
    np.testing.assert_array_equal(means, [2, math.nan, 7])


def test_permutation_test_by_hand():
    # 19 runs and one below them all: 1 of 20 choices. Above them all: all choices fall at least as short.
    old = np.arange(19.0)[:, None]
    assert reference.permutation_test(old, np.array([[-1.0]]), [0.1]) == [1 / 20]
    assert reference.permutation_test(old, np.array([[50.0]]), [0.1]) == [1.0]
    # 2 new runs below 4: one of the 15 ways to choose 2 of 6.
    assert reference.permutation_test(old[:4], np.array([[-1.0], [-2.0]]), [0.1]) == [1 / 15]


@pytest.mark.parametrize("m, n", [(1, 20), (3, 20), (2, 6)])
@pytest.mark.parametrize("heavy", [False, True])
def test_false_alarms_of_the_tests_are_at_most_5_percent(m, n, heavy):
    # Four dependent statistics, one of them nearly constant, as a greedy evaluation is.
    reference.require_enough(n, m)
    rng, alarms, times = np.random.default_rng(1), 0, 300
    for _ in range(times):
        runs = rng.standard_t(2, size=(n + m, 4)) if heavy else rng.normal(size=(n + m, 4))
        runs[:, 1] += 2 * runs[:, 0]
        runs[:, 3] = np.where(runs[:, 3] > -1.5, 0, runs[:, 3])
        alarms += reference.permutation_test(runs[:n], runs[n:], np.full(4, 0.05)).min() <= reference.ALPHA
    # 3 standard deviations of a binomial above 5%.
    assert alarms / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


def test_too_few_runs_are_refused():
    with pytest.raises(reference.NotComparable, match="too few"):
        reference.require_enough(18, 1)
    reference.require_enough(19, 1)


# ----------------------------------------------------------------------------------------------- check.py


def test_a_reference_run_is_compared_with_all_the_others(curves, capsys):
    for seed in (1, 7, 20):
        code, answer = answer_of([curves.parent / f"runs/{seed}", "--curves", curves], capsys)
        assert (code, answer["verdict"], answer["reference_runs"]) == (0, "consistent", 19)
        assert answer["notes"] == [f"the reference's own runs of seeds {seed} are left out"]


def test_one_seed_does_not_count_twice(curves, tmp_path, capsys):
    dirs = [write_run(tmp_path / name, synthetic(31)) for name in "ab"]
    code, answer = answer_of([*dirs, "--curves", curves], capsys)
    assert (code, answer["verdict"]) == (2, "not comparable")
    assert "[31, 31]" in answer["reason"]


@pytest.mark.parametrize("name, content", [
    ("result.json", '{"frames": 50000}'), ("result.json", "[]"), ("result.json", '{"eval_return_mean": null}'),
    ("result.json", '{"eval_return_mean": NaN}'), ("config.json", "{}"), ("metrics.csv", "frames,seconds\n1,2\n"),
])  # fmt: skip
def test_what_is_no_run_of_these_scripts_is_not_comparable_and_no_regression(curves, tmp_path, capsys, name, content):
    run_dir = write_run(tmp_path / "a", synthetic(31))
    (run_dir / name).write_text(content)
    code, answer = answer_of([run_dir, "--curves", curves], capsys)
    assert (code, answer["verdict"]) == (2, "not comparable")


def test_halved_returns_are_a_regression(curves, tmp_path, capsys):
    dirs = [write_run(tmp_path / str(seed), synthetic(seed, factor=0.5)) for seed in (31, 32, 33)]
    for chosen in (dirs[:1], dirs):
        code, answer = answer_of([*chosen, "--curves", curves], capsys)
        assert (code, answer["verdict"]) == (1, "regression")
        assert {row["statistic"] for row in answer["statistics"] if row["p_worse"] <= 0.05} >= {
            "final training return"
        }


def test_slower_learning_is_a_regression_of_area_and_frames(curves, tmp_path, capsys):
    dirs = [write_run(tmp_path / str(seed), synthetic(seed, speed=0.6)) for seed in (31, 32, 33)]
    code, answer = answer_of([*dirs, "--curves", curves], capsys)
    found = {row["statistic"] for row in answer["statistics"] if row["p_worse"] <= 0.05}
    assert code == 1
    assert found == {"area under the curve", "frames to threshold"}


def test_a_better_run_is_better(curves, tmp_path, capsys):
    code, answer = answer_of([write_run(tmp_path / "a", synthetic(31, factor=1.5)), "--curves", curves], capsys)
    assert (code, answer["verdict"]) == (0, "better")


def test_new_runs_of_the_same_kind_are_consistent(curves, tmp_path, capsys):
    dirs = [write_run(tmp_path / str(seed), synthetic(seed)) for seed in (31, 32, 33)]
    code, answer = answer_of([*dirs, "--curves", curves], capsys)
    assert (code, answer["verdict"], answer["runs"], answer["reference_runs"]) == (0, "consistent", 3, 20)
    for row in answer["statistics"]:
        assert row["expected"][0] < row["runs"] < row["expected"][1]


@pytest.mark.parametrize("change, said", [
    ({"total_frames": 20_000}, "total_frames"), ({"learning_rate": 0.2}, "learning_rate"),
    ({"env_id": "Other"}, "Other"),
])  # fmt: skip
def test_other_settings_are_not_comparable(curves, tmp_path, capsys, change, said):
    code, answer = answer_of([write_run(tmp_path / "a", synthetic(31), **change), "--curves", curves], capsys)
    assert (code, answer["verdict"]) == (2, "not comparable")
    assert said in answer["reason"]


def test_another_version_of_the_environment_is_not_comparable(curves, tmp_path, capsys):
    new = synthetic(31)._replace(versions={"jax": "0.12.0", "gymnasium": "1.5.0"})
    run_dir = write_run(tmp_path / "a", new)
    code, answer = answer_of([run_dir, "--curves", curves], capsys)
    assert (code, answer["verdict"]) == (2, "not comparable")
    code, answer = answer_of([run_dir, "--across-versions", "--curves", curves], capsys)
    assert code == 0
    assert answer["notes"] == [
        "jax 0.12.0; the reference had 0.10.2",
        "gymnasium 1.5.0; the reference had 1.4.0",
    ]


def test_an_unfinished_run_is_not_comparable(curves, tmp_path, capsys):
    run_dir = write_run(tmp_path / "a", synthetic(31))
    (run_dir / "result.json").unlink()
    assert check.main([str(run_dir), "--curves", str(curves)]) == 2
    assert capsys.readouterr().out.startswith("NOT COMPARABLE")


def test_the_words_name_the_statistic_and_the_confidence(curves, tmp_path, capsys):
    run_dir = write_run(tmp_path / "a", synthetic(31, factor=0.5))
    assert check.main([str(run_dir), "--curves", str(curves)]) == 1
    text = capsys.readouterr().out
    assert "REGRESSION: " in text
    assert "confidence 95.2%" in text


def test_check_needs_no_jax():
    code = "import sys, check; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmark").returncode == 0


@pytest.mark.parametrize("heavy", [False, True])
def test_leave_one_out_on_synthetic_runs(heavy):
    assert check.leave_one_out([synthetic(seed, heavy=heavy) for seed in range(1, 21)]).count("regression") <= 1


FOLDERS = reference.references()


@pytest.mark.skipif(not FOLDERS, reason="no reference curves in benchmark/curves yet: benchmark/run.py makes them")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_leave_one_out_on_the_reference_curves(folder):
    _, runs = reference.read_reference(folder)
    if len(runs) < 20:
        pytest.skip(f"{len(runs)} seeds are too few to leave one out")
    assert check.leave_one_out(runs).count("regression") <= len(runs) // 20


# ------------------------------------------------------------------------------------------ run.py, plot.py


def test_seeds_of_the_command_line():
    assert run.parse_seeds("1-3,7") == [1, 2, 3, 7]
    for bad in ("", "x", "3-1", "1,1"):
        with pytest.raises(ValueError):
            run.parse_seeds(bad)


def test_workers_have_cores_of_their_own():
    assert run.shares([0, 1, 2, 3], 2) == [[0, 2], [1, 3]]
    assert run.shares([0, 1], 2) == [[0], [1]]
    assert run.shares([0, 1], 3) == [[0], [1], [0]]


def test_curves_of_other_settings_do_not_mix(curves, tmp_path):
    run_dirs = {31: write_run(tmp_path / "a", synthetic(31), learning_rate=0.2)}
    with pytest.raises(run.UsageError, match="learning_rate: 0.2, not 0.1"):
        run.keep_curves("ppo_cartpole", "", (), SETTINGS | {"learning_rate": 0.2}, run_dirs, curves)


def test_a_run_of_other_settings_than_asked_for_is_no_curve(tmp_path):
    run_dirs = {31: write_run(tmp_path / "a", synthetic(31), learning_rate=0.2)}
    with pytest.raises(run.UsageError, match="learning_rate: 0.2, not 0.1"):
        run.keep_curves("ppo_cartpole", "", (), SETTINGS, run_dirs, tmp_path / "curves")


def test_settings_that_are_not_the_defaults_need_a_label(tmp_path, capsys):
    paths = ["--runs", str(tmp_path / "runs"), "--curves", str(tmp_path / "curves")]
    args = ["--script", "ppo_cartpole", "--seeds", "1", *paths, "--", "--learning-rate", "0.5"]
    assert run.main(args) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_a_finished_run_becomes_a_curve(cartpole_run, tmp_path):
    config, result = cartpole_run
    config = asdict(config)
    folder = run.keep_curves("ppo_cartpole", "tiny", (), config, {3: Path(config["run_dir"])}, tmp_path)
    meta, (curve,) = reference.read_reference(folder)
    assert curve.frames.tolist() == [64, 128, 192, 256, 320, 384]
    assert curve.result["eval_return_mean"] == result["eval_return_mean"]
    assert meta["seeds"]["3"]["command"] == "python ppo_cartpole.py --seed 3"
    assert meta["settings"]["num_envs"] == 4
    assert "run_dir" not in meta["settings"] and str(tmp_path) not in (folder / "meta.json").read_text()


def test_an_interrupted_run_is_resumed_and_a_broken_one_begins_anew(tmp_path):
    run_dir = tmp_path / "seed_1"
    run_dir.mkdir()
    assert "--resume" not in run.command_for(ROOT / "ppo_cartpole.py", 1, (), run_dir)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "00000002.msgpack").touch()
    assert run.command_for(ROOT / "ppo_cartpole.py", 1, (), run_dir)[-2:] == ["--resume", str(run_dir)]


def test_a_run_of_another_script_is_stale(tmp_path):
    config = asdict(ppo.Config())
    assert run.why_stale(tmp_path, config, "abc") == ""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.json").write_text('{"script_sha256": "abc"}')
    assert run.why_stale(tmp_path, config, "abc") == ""
    assert "another version" in run.why_stale(tmp_path, config, "def")
    assert "learning_rate" in run.why_stale(tmp_path, config | {"learning_rate": 9.0}, "abc")


def test_tables_in_the_readme_are_what_the_files_say():
    assert plot.make_readme() == (ROOT / "benchmark" / "README.md").read_text(), "run python benchmark/plot.py"


def test_a_typed_number_in_the_readme_is_noticed(curves, tmp_path):
    shutil.copy(ROOT / "benchmark" / "README.md", tmp_path)
    args = ["--curves", str(curves), "--out", str(tmp_path)]
    (tmp_path / "README.md").write_text(plot.make_readme(curves, tmp_path))
    assert plot.main([*args, "--check"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| `ppo_cartpole.py` CartPole-v1 | 50,000 | 20 |" in text
    (tmp_path / "README.md").write_text(text.replace("| 50,000 | 20 |", "| 50,000 | 21 |"))
    assert plot.main([*args, "--check"]) == 1


# ------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_match_the_script_once_and_leave_python(fault):
    source = (ROOT / "ppo_cartpole.py").read_text()
    faulty = faults.plant(fault, source)
    assert (faulty == source) == (fault.name == "none")
    compile(faulty, fault.name, "exec")


def test_a_fault_that_does_not_match_is_refused():
    fault = faults.Fault("absent", "", "no such text", "")
    with pytest.raises(ValueError, match="0 times"):
        faults.plant(fault, "text")
    with pytest.raises(ValueError, match="2 times"):
        faults.plant(replace(fault, old="t"), "text")


def test_at_least_16_faults_with_names_of_their_own():
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) > 16
