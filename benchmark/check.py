"""Is a changed script still the same? Does it still learn in the same way?

    python benchmark/check.py --start ppo_cartpole.py     # seconds: do its first updates equal the recorded ones?
    python benchmark/check.py runs/a runs/b runs/c        # are these finished runs like the reference runs?
    python benchmark/check.py --start my_copy.py          # copied, renamed and changed scripts too

--start plays three updates and compares every column of metrics.csv, with a bound for rounding. Exit code 0: SAME.
1: DIFFERENT, with the update and the column where it parts from the record. A random stream used in another order
parts too, and is no fault: finished runs decide.

Finished runs are compared in every column, over windows of the run, with reference runs of the same settings.
Exit code 0: CONSISTENT, or BETTER (higher returns). 1: REGRESSION (lower returns). 3: CHANGED (returns as they
were, but another column moved). A sound script gets one of the last three in at most 5% of the checks.

Exit code 2, both ways: wrong input, of which one line says what it is; nothing is concluded.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from reference import (
    CURVES,
    ROOT,
    Job,
    NotComparable,
    differences,
    fail,
    last_line,
    machine,
    number,
    read_reference,
    read_run,
    references,
    side_by_side,
    usable_cores,
)

ALPHA = 0.05  # false alarms that the check of finished runs allows itself
# Windows of a run, as parts of its rows. Narrow where much happens in few updates, and one for the annealed end.
EDGES = (0, 0.01, 0.04, 0.12, 0.31, 0.62, 0.91, 1)
FLOOR = 0.01  # of a column's size: deviations smaller than that are no difference that anybody cares about
GREEDY = "greedy evaluation"
RETURNS = ("charts/episodic_return", "charts/episodic_score", GREEDY)  # what REGRESSION and BETTER are about
UPDATES = 3  # of a start
BOUND = 1e-3  # what a start may part by, in parts of the column's size: far above rounding, see rounding/

# What it means if one of these columns parts in the first update; the first line that fits.
MEANINGS = (
    (("frames", "learning_rate", "clip_coef"), "a setting, or the schedule of learning rate and clip range"),
    (("episodic_return", "episodic_length", "episodic_score"),
     "what is played: the environment or its seeds, the first weights, the network, how actions are drawn"),
    (("explained_variance",), "values, advantages or targets: the network, rewards, ends of episodes, compute_gae"),
)  # fmt: skip
OTHERWISE = "what is learned from equal rollouts: the loss, the gradient, the optimizer, the minibatches"
LATER = "what an equal first update hands on: weights, optimizer, annealing, random keys, ends of episodes"
ADVICE = "If you meant to draw random numbers in another order, this is no fault: compare finished runs, see --help."


@dataclass(frozen=True)
class Args:
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()  # finished runs, all with the same settings
    start: Path | None = None  # a script whose first updates are compared with the recorded ones
    seeds: int | None = None  # of a start: play this many of the recorded seeds in place of the usual number
    jobs: int | None = None  # of a start: runs at a time, as many as there are cores by default
    json: bool = False  # print JSON instead of words
    curves: Path = CURVES  # where the reference runs are


# ------------------------------------------------------------------------------------------- finished runs


def cells_of(run, edges):
    """{(column, window): mean over the window}, NaN where it is empty throughout; and the greedy evaluation."""
    cells = {}
    for name in [name for name in run.columns if name != "frames"]:
        values = run.columns[name]
        for window, (first, last) in enumerate(zip(edges, edges[1:])):
            part = values[first:last][~np.isnan(values[first:last])]
            cells[name, window] = part.mean() if len(part) else np.nan
    if run.result:
        cells[GREEDY, len(edges) - 2] = run.result["eval_return_mean"]
    return cells


def table_of(runs, edges):
    """(names, [runs, numbers]) of all cells that are not empty in all runs."""
    cells = [cells_of(run, edges) for run in runs]
    names = [name for name in cells[0] if not all(math.isnan(row[name]) for row in cells)]
    return names, np.array([[row[name] for name in names] for row in cells])


def p_values(runs, m):
    """Are the last m runs unlike the others? A p-value for each number of a run, [n + m, numbers] -> [numbers].

    If nothing has changed, any m of the n + m runs could as well have been the new ones. Each choice of m gets, for
    each number, the distance of their mean from that of all, in standard deviations. The p-value of a number is
    the part of the choices whose largest distance, over all numbers and both directions, reaches the one observed
    (max-T, Westfall and Young 1993). So the chance of any false alarm, in all numbers together, is at most the
    level of the test, however much they depend on each other and whatever their distributions are.
    """
    n = len(runs) - m
    largest_value, size = np.nanmax(abs(runs), 0), np.sqrt(np.nanmean(runs**2, 0))
    runs = np.where(np.isnan(runs), 10 * largest_value + 1, runs)  # to lack what others have is to be far off
    deviation = np.maximum(runs.std(0), FLOOR * size)
    z = (runs - runs.mean(0)) / np.where(deviation > 0, deviation, 1.0)

    # Not scipy.stats.permutation_test, which takes no group of one run. The observed choice counts too.
    if math.comb(n + m, m) <= 10_000:
        choices = np.array(list(combinations(range(n + m), m)))
    else:
        rng = np.random.default_rng(0)
        choices = np.array([np.arange(n, n + m), *(rng.permutation(n + m)[:m] for _ in range(4999))])
    largest = abs(z[choices].mean(1)).max(1)
    return (largest[:, None] >= abs(z[n:].mean(0)) - 1e-9).mean(0)


def require_enough(n, m):
    """Raise NotComparable if n reference and m new runs are too few: even the rarest choice is no alarm."""
    if 1 / math.comb(n + m, m) > ALPHA + 1e-12:
        raise NotComparable(f"{n} reference and {m} new runs are too few for a test at the {ALPHA:.0%} level")


def judge(new, old, edges):
    """Compare Runs with reference Runs. Returns (verdict, rows): a dict for each column and window."""
    require_enough(len(old), len(new))
    for run in new:
        if missing := [name for name in old[0].columns if name not in run.columns]:
            raise NotComparable(f"{run.name} has no column {', '.join(missing)}")
        if not np.array_equal(run.columns["frames"], old[0].columns["frames"]):
            raise NotComparable(f"{run.name} has other rows than the reference: other updates, or rows are missing")
    names, table = table_of(old + new, edges)
    rows = []
    for (column, window), values, p in zip(names, table.T, p_values(table, len(new))):
        here, there = values[len(old) :], values[: len(old)][~np.isnan(values[: len(old)])]
        here, there = here[~np.isnan(here)], there if len(there) else np.full(1, np.nan)
        row = {"column": column, "window": window, "here": here.mean() if len(here) else np.nan}
        row |= {"reference": there.mean(), "low": there.min(), "high": there.max(), "p": p}
        row["z"] = (row["here"] - row["reference"]) / max(there.std(), FLOOR * abs(row["reference"]), 1e-12)
        rows.append({name: x if name in ("column", "window") else float(x) for name, x in row.items()})
    found = [row for row in rows if row["p"] <= ALPHA]
    returns = [row["z"] > 0 for row in found if row["column"] in RETURNS and not math.isnan(row["z"])]
    # Better in one window and worse in another is for a person to look at.
    verdict = "REGRESSION" if not all(returns) else "BETTER" if returns else "CHANGED" if found else "CONSISTENT"
    return verdict, rows


def edges_of(rows):
    """The windows of a run of so many rows: the rows where they begin, and the end."""
    return sorted({round(edge * rows) for edge in EDGES})


def find_reference(run, curves):
    """The folder with reference runs of this run's settings. Raises NotComparable, and says what differs."""
    candidates = []
    for folder in references(curves):
        settings = json.loads((folder / "runs.json").read_text())["settings"]
        if settings["env_id"] == run.settings.get("env_id"):
            candidates.append((differences(run.settings, settings), folder))
    if not candidates:
        raise NotComparable(f"nothing to compare with: there are no reference runs of {run.settings.get('env_id')}")
    found, folder = min(candidates, key=lambda pair: len(pair[0]))
    if found:
        raise NotComparable(f"nothing to compare with: {run.name} is no run of {folder.name} ({'; '.join(found)})")
    return folder


def notes_on(settings, versions, meta):
    """What to know of a comparison that goes on all the same."""
    known = [(name, x, meta["versions"].get(name, x)) for name, x in versions.items()]
    notes = [f"{name} {here}; the reference had {there}" for name, here, there in known if here != there]
    for here, there, what in ((settings, meta["settings"], "new"), (meta["settings"], settings, "gone")):
        notes += [f"the setting {name} is {what}" for name in here if name not in there]
    return notes


def check_runs(run_dirs, curves=CURVES):
    """The answer on finished runs, a dict. Raises NotComparable."""
    runs = [read_run(path) for path in run_dirs]
    own = [run.seed for run in runs]
    if len(set(own)) < len(own):
        raise NotComparable(f"these runs have the seeds {own}: two of one seed would be one run counted twice")
    for run in runs[1:]:
        if found := differences(run.settings, runs[0].settings):
            raise NotComparable(f"{run.name} and {runs[0].name} have different settings ({'; '.join(found)})")
    folder = find_reference(runs[0], curves)
    meta, old = read_reference(folder)
    notes = [note for run in runs for note in notes_on(run.settings, run.versions, meta)]
    # With no change at all they would be the same runs, and not two draws of one kind.
    if shared := [run.seed for run in old if run.seed in own]:
        notes.append(f"the reference's own runs of seeds {', '.join(map(str, shared))} are left out")
        old = [run for run in old if run.seed not in own]
    require_enough(len(old), len(runs))
    edges = edges_of(len(old[0].columns["frames"]))
    verdict, rows = judge(runs, old, edges)
    updates = [0, *(old[0].columns["frames"] / (meta["settings"]["num_envs"] * meta["settings"]["num_steps"]))]
    windows = [(round(updates[first]) + 1, round(updates[last])) for first, last in zip(edges, edges[1:])]
    about = {"verdict": verdict, "reference": f"{meta['script']}.py, {folder.name}", "runs": len(runs)}
    about |= {"reference_runs": len(old), "notes": list(dict.fromkeys(notes)), "windows": windows}
    return about | {"rows": rows}


def span(window):
    first, last = window
    return f"{first}" if first == last else f"{first}-{last}"


def report_runs(answer, most=6):
    """The answer in words: a table of distances, what was found, and what it means."""
    lines = [f"{answer['reference']}: {answer['runs']} new runs against {answer['reference_runs']} reference runs"]
    lines += [f"note: {note}" for note in answer["notes"]]
    lines += ["", "standard deviations of the reference runs from their mean; * is more than chance explains"]
    lines.append(f"{'updates':<26}" + "".join(f"{span(window):>10}" for window in answer["windows"]))
    found = [row for row in answer["rows"] if row["p"] <= ALPHA]
    for column in dict.fromkeys(row["column"] for row in answer["rows"]):
        rows = {row["window"]: row for row in answer["rows"] if row["column"] == column}
        cells = [rows.get(window) for window in range(len(answer["windows"]))]
        words = [f"{row['z']:+.1f}{'*' if row in found else ' '}" if row else "" for row in cells]
        lines.append(f"{column.split('/')[-1]:<26}" + "".join(f"{word:>10}" for word in words))
    lines.append("")
    for row in sorted(found, key=lambda row: (row["column"] not in RETURNS, row["p"], -abs(row["z"])))[:most]:
        where = f"{row['column']}, updates {span(answer['windows'][row['window']])}"
        seen = f"{number(row['low'])} to {number(row['high'])}"
        what = f"{number(row['here'])} here, {number(row['reference'])} in the reference"
        lines.append(f"{where}: {what} (single runs: {seen}), p = {row['p']:.2g}")
    if len(found) > most:
        lines.append(f"and {len(found) - most} more")
    smallest = min(row["p"] for row in answer["rows"])
    meaning = {
        "REGRESSION": "returns are lower than chance explains",
        "BETTER": "returns are higher than chance explains",
        "CHANGED": "returns are as they were, but it learns in another way",
        "CONSISTENT": f"chance explains all differences (p = {smallest:.2g} at the least)",
    }[answer["verdict"]]
    return "\n".join([*lines, f"{answer['verdict']}: {meaning}"])


# ------------------------------------------------------------------------------------------------- starts


def original_of(script):
    """The name of the script of this repository that `script` is, or was copied from: most lines in common."""
    lines = set(script.read_text().splitlines())
    return max(ROOT.glob("ppo_*.py"), key=lambda path: len(lines & set(path.read_text().splitlines()))).stem


# Several runs in one process, since to import everything takes longer than three updates; nothing is evaluated.
PLAY = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
sys.modules["script"] = script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.report = script.save_checkpoint = lambda *args: {}
sys.exit(next(filter(None, map(script.main, json.loads(sys.argv[2]))), 0))
"""


def play_starts(script, wanted, folder, at_once=None):
    """Play the first updates of wanted = {setting: (flags, seeds)}, in `folder`. Returns {setting: [Run]}."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the record was made; other devices round in other ways
    dirs = {(name, seed): folder / f"{name}__{seed}" for name, (_, seeds) in wanted.items() for seed in seeds}
    lines = [["--seed", str(seed), "--run-dir", str(x), *wanted[name][0]] for (name, seed), x in dirs.items()]
    at_once = min(at_once or len(usable_cores()), len(lines))
    parts = [[lines[i] for i in part] for part in np.array_split(range(len(lines)), at_once)]
    commands = [[sys.executable, "-c", PLAY, str(script), json.dumps(part)] for part in parts]
    jobs = [Job(command, folder / f"part_{i}") for i, command in enumerate(commands)]
    for job, code, _ in side_by_side(jobs, at_once):
        if code:
            raise NotComparable(f"{script} stopped with exit code {code}: {last_line(job.log)}")
    return {name: [read_run(dirs[name, seed], whole=False) for seed in wanted[name][1]] for name in wanted}


def parted(run, recorded, size):
    """[{update, column, here, recorded, difference}] of one seed, the largest difference of each update first."""
    found = []
    for column, values in recorded.columns.items():
        if column not in run.columns:
            raise NotComparable(f"the script wrote no column {column}")
        for update, (here, there) in enumerate(zip(run.columns[column], values)):
            same = here == there or (math.isnan(here) and math.isnan(there))
            difference = 0.0 if same else np.nan_to_num(abs(here - there) / size[column][update], nan=np.inf)
            row = {"update": update + 1, "column": column, "here": float(here), "recorded": float(there)}
            found.append(row | {"difference": float(difference)})
    return sorted(found, key=lambda row: (row["update"], -row["difference"]))


def compare_start(runs, recorded):
    """The answer on one setting: "largest" difference of each update; "apart": {seed: rows of `parted`}; ..."""
    originals, size = {run.seed: run for run in recorded}, {}
    for name in recorded[0].columns:
        column = np.array([run.columns[name] for run in recorded])  # its size: root mean square of what is not empty
        size[name] = np.sqrt(np.nansum(column**2, 0) / np.maximum((~np.isnan(column)).sum(0), 1)) + 1e-12
    rows = {run.seed: parted(run, originals[run.seed], size) for run in runs}
    apart = {seed: [row for row in found if row["difference"] > BOUND] for seed, found in rows.items()}
    every = [row for found in rows.values() for row in found]
    largest = [max(row["difference"] for row in every if row["update"] == i + 1) for i in range(UPDATES)]
    answer = {"seeds": list(rows), "recorded_seeds": len(recorded), "largest": largest}
    answer |= {"apart": {seed: found for seed, found in apart.items() if found}, "strangest": None}
    with contextlib.suppress(NotComparable):  # other frames, or too few recorded seeds to say what is chance
        if answer["apart"]:
            _, cells = judge(runs, recorded, range(UPDATES + 1))
            answer["strangest"] = min(cells, key=lambda row: (row["p"], -abs(row["z"])))
    return answer


def check_start(script, curves=CURVES, seeds=None, at_once=None):
    """The answers on all recorded settings of a script, {setting: dict}. Raises NotComparable."""
    if not script.is_file():
        raise NotComparable(f"--start {script}: there is no such script")
    original = original_of(script)
    recorded = {path.name: read_reference(path, "start") for path in references(curves, "start", original)}
    if not recorded:
        raise NotComparable(f"nothing to compare with: no starts of {original}.py are recorded in {curves}")
    wanted = {}
    for name, (meta, runs) in recorded.items():
        wanted[name] = meta["flags"], [run.seed for run in runs[: seeds or meta["check_seeds"]]]
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        played = play_starts(script, wanted, Path(folder), at_once)
    answers = {}
    for name, (meta, runs) in recorded.items():
        versions = {package: importlib.metadata.version(package) for package in meta["versions"]}
        notes = [f"the setting {found}" for found in differences(played[name][0].settings, meta["settings"])]
        notes += notes_on(played[name][0].settings, versions, meta)
        answers[name] = compare_start(played[name], runs) | {"notes": notes}
    verdict = "DIFFERENT" if any(answer["apart"] for answer in answers.values()) else "SAME"
    about = {"verdict": verdict, "original": original, "cpu": machine()["cpu"]}
    return about | {"jax": importlib.metadata.version("jax"), "settings": answers}


def first_sign(rows):
    """(update, number in MEANINGS) of where one seed parts first; MEANINGS has one line less than that if later."""
    first = min(row["update"] for row in rows)
    names = {row["column"].split("/")[-1] for row in rows if row["update"] == first}
    fits = [i for i, (columns, _) in enumerate(MEANINGS) if names & set(columns)]
    return first, (fits or [len(MEANINGS)])[0] if first == 1 else len(MEANINGS) + 1


def report_start(script, answer, most=3):
    """The answer in words: each setting, then what all of them together point to."""
    kind = "" if script.stem == answer["original"] else f" (a copy of {answer['original']}.py)"
    lines, signs = [f"{script.name}{kind}: its first {UPDATES} updates against the recorded ones"], []
    for name, found in answer["settings"].items():
        seeds, apart = ", ".join(map(str, found["seeds"])), found["apart"]
        lines += ["", f"{name}, seeds {seeds}", *(f"note: {note}" for note in found["notes"])]
        if not apart:
            lines.append(f"SAME: {max(found['largest']):.1g} of a column's size apart; rounding may reach {BOUND:g}")
            continue
        seed = min(apart, key=lambda seed: apart[seed][0]["update"])
        lines.append(f"DIFFERENT: {len(apart)} of {len(found['seeds'])} seeds part, seed {seed} first:")
        for row in apart[seed][:most]:
            values = f"{number(row['here'])} here, {number(row['recorded'])} recorded"
            lines.append(f"  update {row['update']}, {row['column']}: {values}, {row['difference']:.2g} of its size")
        more = sum(map(len, apart.values())) - most
        lines += ([f"  and {more} more"] if more > 0 else []) + chance_of(found)
        signs += map(first_sign, apart.values())
    if signs:
        texts = [*(text for _, text in MEANINGS), OTHERWISE, LATER]
        lines += ["", f"DIFFERENT. This points to {texts[min(signs)[1]]}.", ADVICE]
    return "\n".join(lines)


def chance_of(found):
    """What the spread of the recorded seeds says about a start that parts: could it be other random numbers?"""
    row, known = found["strangest"], f"the {found['recorded_seeds']} recorded seeds"
    if row is None:
        return []
    if row["p"] > ALPHA:
        return [f"  no more than other random numbers would do: within what {known} show (p = {row['p']:.2g})"]
    seen = f"{known} have {number(row['low'])} to {number(row['high'])}"
    where = f"{row['column']}, update {row['window'] + 1}: {number(row['here'])} on average, {seen}"
    return [f"  more than other random numbers explain (p = {row['p']:.2g}): {where}"]


# --------------------------------------------------------------------------------------------------- main


def main(args=None):
    """Run a command line; returns the exit code."""
    args = tyro.cli(Args, args=args, description=__doc__)
    try:
        if bool(args.start) == bool(args.run_dirs):
            raise NotComparable("name run directories, or a script with --start")
        if args.start:
            answer = check_start(args.start, args.curves, args.seeds, args.jobs)
        else:
            answer = check_runs(args.run_dirs, args.curves)
    except NotComparable as error:
        return fail(error)
    report = report_start(args.start, answer) if args.start else report_runs(answer)
    print(json.dumps(answer, indent=2) if args.json else report)
    return {"SAME": 0, "DIFFERENT": 1, "CONSISTENT": 0, "BETTER": 0, "REGRESSION": 1, "CHANGED": 3}[answer["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
