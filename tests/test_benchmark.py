"""The programs in benchmark/: verdicts and their calibration, starts, wrong input, what is kept, tables, faults."""

import json
import math
import sys
from importlib import import_module

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

# Not by import statements: these are no packages that the tests need.
check, faults, plot, reference, run = map(import_module, ("check", "faults", "plot", "reference", "run"))

SETTINGS = {"env_id": "CartPole-v1", "total_frames": 50_000, "num_envs": 10, "num_steps": 100, "learning_rate": 0.1}
VERSIONS = {"jax": "0.10.2", "gymnasium": "1.4.0"}
SCRIPTS = [path.stem for path in sorted(ROOT.glob("ppo_*.py"))]


def synthetic(seed, factor=1.0, loss=1.0, rows=50):
    """A Run that learns from a return of 20 to about 400 * factor, with noise of its own."""
    rng = np.random.default_rng(seed)
    frames = np.arange(1, rows + 1) * 1000.0
    returns = 20 + (380 * factor + 15 * rng.normal()) / (1 + np.exp(-(frames - 15_000 + 1500 * rng.normal()) / 4000))
    columns = {"frames": frames, "charts/episodic_return": returns + 8 * rng.normal(size=rows)}
    columns["losses/value_loss"] = loss * np.exp(-frames / 20_000) * (1 + 0.1 * rng.normal(size=rows))
    columns["charts/learning_rate"] = 1 - frames / 60_000
    columns["charts/episodic_return"][0] = math.nan  # no episode ends so early
    result = {"eval_return_mean": min(500.0, 420 * factor + 20 * rng.normal()), "seconds": 3.0}
    return reference.Run(f"seed {seed}", seed, columns, result, SETTINGS, VERSIONS)


def write_run(run_dir, run, **changes):
    """A finished run directory, as the scripts leave it."""
    run_dir.mkdir(parents=True)
    columns = {"frames": run.columns["frames"], "seconds": run.columns["frames"] / 1e4} | run.columns
    lines = [["" if math.isnan(x) else f"{x:.6g}" for x in row] for row in zip(*columns.values())]
    (run_dir / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in [columns, *lines]))
    (run_dir / "config.json").write_text(json.dumps(run.settings | {"seed": run.seed, "run_dir": "x"} | changes))
    result = run.result | {"versions": run.versions, "eval_greedy": True}  # no number, though Python counts with it
    (run_dir / "result.json").write_text(json.dumps(result))
    return run_dir


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """A folder of reference runs, made by run.keep_runs from 20 synthetic ones."""
    root = tmp_path_factory.mktemp("reference")
    run_dirs = {seed: write_run(root / f"runs/{seed}", synthetic(seed)) for seed in range(1, 21)}
    run.keep_runs(ROOT / "ppo_cartpole.py", (), run_dirs, root / "curves/ppo_cartpole/CartPole-v1")
    return root / "curves"


def answer_of(arguments, capsys):
    """(exit code, JSON answer) of check.py."""
    code = check.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------- finished runs


def test_p_values_by_hand():
    # 19 runs and one that is farther off than any: 1 of 20 choices. In the middle: all are at least as far off.
    old = np.arange(19.0)[:, None]
    np.testing.assert_allclose(check.p_values(np.r_[old, [[-30.0]]], 1), [1 / 20])
    np.testing.assert_allclose(check.p_values(np.r_[old, [[9.0]]], 1), [1.0])
    # 2 new runs above 4: of the 15 ways to choose 2 of 6 only they, and the two lowest, are as far off.
    np.testing.assert_allclose(check.p_values(np.array([[1.0], [2], [3], [4], [5], [6]]), 2), [2 / 15])


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("heavy", [False, True])
def test_false_alarms_are_at_most_5_percent(m, heavy):
    # Numbers that depend on each other, one of them nearly constant, one often missing.
    rng, alarms, times = np.random.default_rng(1), 0, 200
    for _ in range(times):
        runs = rng.standard_t(2, size=(20 + m, 6)) if heavy else rng.normal(size=(20 + m, 6))
        runs[:, 1] += 2 * runs[:, 0]
        runs[:, 3] = np.where(runs[:, 3] > -1.5, 100, 100 + runs[:, 3])
        runs[:, 4][rng.random(20 + m) < 0.3] = np.nan
        alarms += check.p_values(runs, m).min() <= check.ALPHA
    assert alarms / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)  # 3 standard deviations of a binomial


@pytest.mark.parametrize("changes, verdict, code", [
    ({}, "CONSISTENT", 0), ({"factor": 0.5}, "REGRESSION", 1), ({"factor": 1.5}, "BETTER", 0),
    ({"loss": 1.5}, "CHANGED", 3),
])  # fmt: skip
def test_verdicts(curves, tmp_path, capsys, changes, verdict, code):
    dirs = [write_run(tmp_path / str(seed), synthetic(seed, **changes)) for seed in (31, 32, 33)]
    assert check.main([*map(str, dirs), "--curves", str(curves)]) == code
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(verdict)
    if verdict == "CHANGED":
        assert "losses/value_loss, updates " in text
    if "factor" in changes:  # one run is enough for so much
        assert answer_of([dirs[0], "--curves", curves], capsys)[0] == code


def test_a_value_that_only_the_new_runs_lack_is_a_change(curves, tmp_path, capsys):
    runs = [synthetic(seed) for seed in (31, 32, 33)]
    for each in runs:
        each.columns["losses/value_loss"][-5:] = math.nan
    dirs = [write_run(tmp_path / each.name, each) for each in runs]
    code, answer = answer_of([*dirs, "--curves", curves], capsys)
    found = [row for row in answer["rows"] if row["p"] <= check.ALPHA]
    last = len(answer["windows"]) - 1
    assert (code, [(row["column"], row["window"]) for row in found]) == (3, [("losses/value_loss", last)])


def test_a_reference_run_is_compared_with_all_the_others(curves, capsys):
    code, answer = answer_of([curves.parent / "runs/7", "--curves", curves], capsys)
    assert (code, answer["reference_runs"]) == (0, 19)
    assert "the reference's own runs of seeds 7 are left out" in answer["notes"]


@pytest.mark.parametrize("folder", reference.references(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_reference_runs_do_not_accuse_each_other(folder):
    _, runs = reference.read_reference(folder)
    text = plot.false_alarms(runs)
    if text == "too few seeds":
        assert len(runs) < 20
    else:
        assert [int(x) <= y for x, y in zip(text.replace(" of ", " and ").split(" and "), (1, 3))] == [True, True]


# -------------------------------------------------------------------------------------------- wrong input


def test_wrong_input_is_one_line_and_exit_code_2(curves, tmp_path, capsys):
    def spoiled(name, content, seed=31):
        run_dir = write_run(tmp_path / f"{name}{len(list(tmp_path.iterdir()))}", synthetic(seed))
        (run_dir / name).write_text(content((run_dir / name).read_text()) if callable(content) else content)
        return run_dir

    good = [write_run(tmp_path / str(seed), synthetic(seed)) for seed in (31, 32, 33)]
    cases = {
        "": [], "both": [good[0], "--start", ROOT / "ppo_cartpole.py"],
        "no such script": ["--start", tmp_path / "x.py"],
        "no starts": ["--start", ROOT / "ppo_cartpole.py"], "seeds [31, 31]": [good[0], good[0]],
        "not a finished run": [tmp_path / "nothing"],
        "breaks off": [spoiled("metrics.csv", lambda text: text[:-30])],
        "eval_return_mean": [spoiled("result.json", '{"frames": 50000}')],
        "'list' object": [spoiled("result.json", "[]")],
        "nan": [spoiled("result.json", '{"eval_return_mean": NaN}')], "seed": [spoiled("config.json", "{}")],
        "no column losses/value_loss": [spoiled("metrics.csv", lambda text: text.replace("value_loss", "other"))],
        "other rows": [spoiled("metrics.csv", lambda text: "\n".join(text.splitlines()[:-5]) + "\n")],
        "total_frames: 50000, not 9": [write_run(tmp_path / "budget", synthetic(34), total_frames=9), good[0]],
        "learning_rate: 0.2, not 0.1": [write_run(tmp_path / "rate", synthetic(34), learning_rate=0.2)],
        "no reference runs of Other": [write_run(tmp_path / "env", synthetic(34), env_id="Other")],
    }  # fmt: skip
    for said, arguments in cases.items():
        assert check.main([*map(str, arguments), "--curves", str(curves)]) == 2, said
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1 and err.startswith("error: "), said
        assert said in err or said == "both"
    with pytest.raises(reference.NotComparable, match="too few"):
        check.judge([synthetic(31)], [synthetic(seed) for seed in range(18)], check.edges_of(50))


def test_wrong_input_of_the_other_programs(tmp_path, capsys):
    for main, args in (
        (run.main, ["ppo_cartpole", "CartPole-v1", "--seeds", "3-1"]), (run.main, ["ppo_cartpole", "absent"]),
        (run.main, ["ppo_absent"]), (faults.main, ["ppo_absent"]),
        (faults.main, ["ppo_cartpole", "--only", "absent"]),
    ):  # fmt: skip
        assert main(args) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------- starts

# A script of three updates that takes no time, and whose evaluation takes too much.
FAKE = """
import json, math, pathlib, time

def report():
    time.sleep(60)

def main(args):
    flags = dict(zip(args[::2], args[1::2]))
    folder, seed = pathlib.Path(flags["--run-dir"]), int(flags["--seed"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"env_id": "Fake-v0", "seed": seed, "rate": 1}))
    rows = [[8 * k, 5 + math.sin(seed), 1 + math.cos(seed + k)] for k in (1, 2, 3)]
    lines = ["frames,charts/episodic_return,losses/value_loss", *(",".join(map(str, row)) for row in rows)]
    (folder / "metrics.csv").write_text("\\n".join(lines) + "\\n")
    report()
"""


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """(script, curves): a script and 20 starts of it, recorded by run.record_starts."""
    root = tmp_path_factory.mktemp("starts")
    script = root / "ppo_fake.py"
    script.write_text(FAKE)
    run.record_starts(script, [run.Setting("ppo_fake", "Fake", "", 8, 2)], range(1, 21), root / "curves")
    return script, root / "curves"


@pytest.mark.parametrize("old, new, verdict, said", [
    ("", "", "SAME", "SAME: 0 of"),
    ("1 + math.cos(seed + k)", "1.00001 + math.cos(seed + k)", "SAME", "apart; rounding may reach"),
    ("math.cos(seed + k)", "(2 if k == 2 else 1) * math.cos(seed + k)", "DIFFERENT", check.LATER),
    ("1 + math.cos", "9 + math.cos", "DIFFERENT", "more than other random numbers explain"),
    ("math.sin(seed)", "math.sin(seed + 9)", "DIFFERENT", "no more than other random numbers would do"),
    ("math.sin(seed)", "math.sin(seed + 9)", "DIFFERENT", "what is played"),
    ('"rate": 1', '"rate": 2', "SAME", "the setting rate: 2, not 1"),
])  # fmt: skip
def test_start_of_a_renamed_copy(starts, tmp_path, capsys, monkeypatch, old, new, verdict, said):
    monkeypatch.setattr(check, "original_of", lambda script: "ppo_fake")
    copy = tmp_path / "my_idea.py"
    copy.write_text(FAKE.replace(old, new) if old else FAKE)
    code = check.main(["--start", str(copy), "--curves", str(starts[1])])
    text = capsys.readouterr().out
    assert (code, verdict in text, said in text) == (int(verdict == "DIFFERENT"), True, True), text


def test_a_copy_is_recognized(tmp_path):
    for script in SCRIPTS:
        copy = tmp_path / "my_idea.py"
        copy.write_text((ROOT / f"{script}.py").read_text().replace("0.95", "0.9").replace("v5", "v4"))
        assert check.original_of(copy) == script


def test_rounding_is_far_below_the_bound():
    for path in (ROOT / "benchmark" / "rounding").glob("*.json"):
        for found in json.loads(path.read_text())["settings"].values():
            assert max(found["largest"]) <= check.BOUND / 3, path


# --------------------------------------------------------------------------------------- kept runs, tables


def test_what_is_kept_is_what_was_read(curves):
    _, kept = reference.read_reference(curves / "ppo_cartpole/CartPole-v1")
    for each in kept:
        fresh = reference.read_run(curves.parent / f"runs/{each.seed}")
        assert fresh.result == each.result and "eval_greedy" not in fresh.result
        for name in fresh.columns:
            np.testing.assert_array_equal(fresh.columns[name], each.columns[name])


def test_long_runs_are_kept_as_means_of_what_is_there(monkeypatch):
    monkeypatch.setattr(reference, "MAX_ROWS", 3)
    columns = {"frames": np.arange(1.0, 6), "x": np.array([1, 3, math.nan, math.nan, 7.0])}
    found = reference.compact(columns)
    np.testing.assert_array_equal(found["frames"], [2, 4, 5])
    np.testing.assert_array_equal(found["x"], [2, math.nan, 7])


def test_an_interrupted_run_is_resumed_and_another_scripts_is_refused(tmp_path):
    script, run_dir = tmp_path / "ppo_x.py", tmp_path / "seed_1"
    script.write_text("")
    assert "--seed" in run.job_for(script, ("--a",), 1, run_dir, "refuse").command
    (run_dir).mkdir()
    (run_dir / "checkpoint.msgpack").touch()
    assert run.job_for(script, ("--a",), 1, run_dir, "refuse").command[-2:] == ["--resume", str(run_dir)]
    script.write_text("#")
    with pytest.raises(reference.NotComparable, match="another version"):
        run.job_for(script, ("--a",), 1, run_dir, "refuse")
    assert "--seed" in run.job_for(script, ("--a",), 1, run_dir, "rerun").command


def test_interquartile_mean_and_its_interval():
    assert plot.interquartile_mean([8, 1, 100, 4, 2, 7, 3, -50]) == (2 + 3 + 4 + 7) / 4
    rng = np.random.default_rng(0)
    intervals = [plot.interval(rng.normal(size=20)) for _ in range(50)]
    assert 0.8 <= np.mean([low <= 0 <= high for low, high in intervals])


def test_tables_in_the_readme_are_what_the_files_say():
    assert plot.make_readme() == (ROOT / "benchmark" / "README.md").read_text(), "run python benchmark/plot.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_faults_match_the_script_once_and_leave_python(script):
    source = (ROOT / f"{script}.py").read_text()
    planted = faults.faults_of(script)
    assert len({fault.name for fault in planted}) == len(planted) > 24
    for fault in planted:
        faulty = faults.plant(fault, source)
        assert (faulty == source) == (fault.name == "none")
        compile(faulty, fault.name, "exec")
    with pytest.raises(reference.NotComparable, match="2 times"):
        faults.plant(planted[1]._replace(old="t"), "text")
