"""What the programs in this folder share: curves on disk, the numbers taken from a run, and the statistics.

One curve is the training return of one seed. A folder curves/<script>/<env>/ holds one curve per seed, what
the greedy evaluation of each gave (results.csv), and how all of it came about (meta.json). Needs NumPy alone,
so that check.py starts quickly.
"""

import csv
import json
import math
import os
import platform
import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CURVES = HERE / "curves"
MAX_ROWS = 200  # of a curve on disk: enough for a figure and for every statistic
# They do not change what is learned.
NOT_SETTINGS = ("seed", "run_dir", "resume", "evaluate", "checkpoint_every", "distributed", "coordinator_address",
                "num_processes", "process_id")  # fmt: skip
ALPHA = 0.05  # false alarms that check.py allows itself


class Run(NamedTuple):
    """What is kept of one finished run."""

    name: str
    seed: int
    frames: np.ndarray  # int [R], the frames played up to each row
    columns: dict  # {name: float [R]}, "episodic_return" and its kin; NaN where no episode ended
    result: dict  # result.json: frames, seconds, eval_*
    settings: dict  # config.json without NOT_SETTINGS
    versions: dict  # of the packages that it ran with


class NotComparable(ValueError):
    """There is nothing to compare a run with, or comparing would mean nothing; the message says why."""


# ------------------------------------------------------------------------------------ reading and writing


def settings_of(config):
    return {name: value for name, value in config.items() if name not in NOT_SETTINGS}


def differences(settings, other):
    """["name: a, not b"] of the settings that both have and that differ."""
    shared = [name for name in settings if name in other]
    return [f"{name}: {settings[name]}, not {other[name]}" for name in shared if settings[name] != other[name]]


def read_table(path):
    """{column: float array} of a CSV file of numbers; NaN where a cell is empty."""
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2:
        raise NotComparable(f"{path} has no rows")
    return dict(zip(rows[0], np.array([[float(cell or "nan") for cell in row] for row in rows[1:]]).T))


def compact(frames, values, max_rows=MAX_ROWS):
    """At most max_rows rows, each the mean of as many updates as it takes; NaN where none has a value."""
    size = math.ceil(len(frames) / max_rows)
    edges = range(0, len(frames), size)
    parts = [values[i : i + size][~np.isnan(values[i : i + size])] for i in edges]
    means = np.array([part.mean() if len(part) else np.nan for part in parts])
    return np.array([frames[i : i + size][-1] for i in edges]).astype(int), means


def read_run(run_dir):
    """The Run in a run directory of a script. Raises NotComparable if it is not finished, or no such thing."""
    run_dir = Path(run_dir)
    try:
        config, result = (json.loads((run_dir / name).read_text()) for name in ("config.json", "result.json"))
        table = read_table(run_dir / "metrics.csv")
        seed, evaluated, _ = config["seed"], float(result["eval_return_mean"]), table["charts/episodic_return"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotComparable(f"{run_dir} is not a finished run of these scripts: {error!r}") from None
    if not math.isfinite(evaluated):
        raise NotComparable(f"{run_dir}: the evaluation gave {evaluated}")
    names = [name for name in table if name.startswith("charts/episodic_")]
    # Rounded like the curves on disk, so that a reference run is exactly itself.
    pairs = {name.removeprefix("charts/"): compact(table["frames"], table[name]) for name in names}
    columns = {name: np.array([float(f"{x:.6g}") for x in values]) for name, (_, values) in pairs.items()}
    frames = pairs["episodic_return"][0]
    return Run(str(run_dir), seed, frames, columns, result, settings_of(config), result.get("versions", {}))


def write_curve(path, run):
    cells = [["" if math.isnan(x) else f"{x:.6g}" for x in values] for values in run.columns.values()]
    rows = [["frames", *run.columns], *zip(run.frames.tolist(), *cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


def write_json(path, content):
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def folder_name(env_id, label=""):
    return env_id.replace("/", "-") + (f"__{label}" if label else "")


def read_reference(folder):
    """(meta, list of Run), one per seed in the order of seeds, of a folder of curves."""
    meta = json.loads((folder / "meta.json").read_text())
    with open(folder / "results.csv", newline="") as file:
        results = {row["seed"]: row for row in csv.DictReader(file)}
    runs = []
    for seed in sorted(meta["seeds"], key=int):
        table = read_table(folder / f"seed_{seed}.csv")
        frames = table.pop("frames").astype(int)
        result = {name: float(cell) for name, cell in results[seed].items() if cell}
        runs.append(Run(f"seed {seed}", int(seed), frames, table, result, meta["settings"], meta["versions"]))
    return meta, runs


def references(curves=CURVES):
    """The folders that hold reference curves."""
    return sorted(path.parent for path in Path(curves).glob("*/*/meta.json"))


def cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def usable_cores():
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine():
    """What a time depends on, without naming the host."""
    return {"cpu": cpu_model(), "cores": len(usable_cores()), "system": platform.system()}


def peak_mib(usage):
    """The peak memory in a resource usage, which counts bytes on macOS, else KiB."""
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# -------------------------------------------------------------------------------------- numbers of one run


def filled(values):
    """[R], gaps filled with the last value before them; those at the start with the first value there is."""
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        raise NotComparable("no episode ended in this run")
    last = known[np.maximum(np.searchsorted(known, np.arange(len(values)), side="right") - 1, 0)]
    return values[last]


def returns_of(run):
    return filled(run.columns["episodic_return"])


def final_return(run):
    """The mean training return over the last 10% of the frames."""
    return float(returns_of(run)[run.frames > 0.9 * run.frames[-1]].mean())


def area(run):
    """The area under the curve divided by its width: the mean training return of the whole run."""
    return float(np.average(returns_of(run), weights=np.diff(run.frames, prepend=0)))


def frames_to(run, threshold):
    """The frames after which the return, averaged over 5% of the run, first reached `threshold`.

    A run that never does counts as twice its budget: worse than any that does, and still a number.
    """
    returns = returns_of(run)
    window = max(1, round(0.05 * len(returns)))
    padded = np.concatenate([np.full(window - 1, returns[0]), returns])
    smooth = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    reached = np.flatnonzero(smooth >= threshold)
    return float(run.frames[reached[0]] if len(reached) else 2 * run.frames[-1])


class Scale(NamedTuple):
    """What the runs of a reference say about the task."""

    start: float  # the first return seen
    end: float  # return at the end of training
    threshold: float  # 80% of the way between them


def scale_of(runs):
    start = interquartile_mean([returns_of(run)[0] for run in runs])
    end = interquartile_mean([final_return(run) for run in runs])
    return Scale(start, end, start + 0.8 * (end - start))


def statistics(run, scale):
    """{name: value} of the four numbers that check.py compares."""
    return {
        "final training return": final_return(run),
        "greedy evaluation": float(run.result["eval_return_mean"]),
        "area under the curve": area(run),
        "frames to threshold": frames_to(run, scale.threshold),
    }


# ---------------------------------------------------------------------------------------------- statistics


def interquartile_mean(values, axis=0):
    """The mean of the middle half: the lowest and the highest quarter (rounded down) are left out.

    Agarwal et al. 2021, arXiv 2108.13264. A mean follows one lucky seed, a median ignores half of them.
    """
    values = np.sort(np.asarray(values, float), axis=axis)
    cut = values.shape[axis] // 4
    return np.take(values, range(cut, values.shape[axis] - cut), axis=axis).mean(axis)


def bootstrap_interval(strata, level=0.95, draws=2000, seed=0):
    """The interquartile mean's percentile bootstrap interval, stratified (arXiv 2108.13264).

    Args:
      strata: a list of arrays [seeds, ...], one for each environment; the seeds of each are drawn by
        themselves, with replacement, and pooled. With one environment, seeds are all that is drawn.

    Returns:
      (low, high), each [...].
    """
    rng, means = np.random.default_rng(seed), []
    for _ in range(draws):
        drawn = [np.asarray(runs)[rng.integers(len(runs), size=len(runs))] for runs in strata]
        means.append(interquartile_mean(np.concatenate(drawn)))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def choices_of(total, size, limit=5000, seed=0):
    """[C, size]: the ways to choose `size` of `total`, the last ones first: all, or `limit` random ones."""
    observed = np.arange(total - size, total)
    if math.comb(total, size) <= limit:
        others = np.array([choice for choice in combinations(range(total), size)])
        return np.concatenate([observed[None], others[(others != observed).any(1)]])
    rng = np.random.default_rng(seed)
    return np.concatenate([observed[None], [rng.permutation(total)[:size] for _ in range(limit - 1)]])


def permutation_test(reference, new, floor):
    """Are the new runs worse than the reference in any statistic? One exact test, for one run or many.

    If they were not, any m of the n + m runs could as well have been the new ones. Each choice of m runs
    gets, for each statistic, a shortfall: how far their mean lies below that of all, in standard deviations.
    The p-value of a statistic is the part of the choices whose *largest* shortfall over all statistics is at
    least the one observed (Westfall and Young 1993, max-T), so the chance of a false alarm in any of the
    statistics together stays at the level of the test, however much they depend on each other.

    Args:
      reference: [n, S], new: [m, S]; higher is better in all S statistics.
      floor: [S], a standard deviation below which no difference matters; also keeps it above 0.

    Returns:
      p-values [S].
    """
    runs = np.concatenate([reference, new])
    shortfall = (runs.mean(0) - runs) / np.maximum(runs.std(0), floor)
    choices = choices_of(len(runs), len(new))
    means = shortfall[choices].mean(1)  # [C, S]
    largest = means.max(1)
    return (largest[:, None] >= means[0] - 1e-9).mean(0)  # the observed choice counts too, so p is never 0


def require_enough(n, m):
    """Raise NotComparable if n reference and m new runs are too few: even the rarest choice is no alarm."""
    if 1 / math.comb(n + m, m) > ALPHA + 1e-12:
        raise NotComparable(f"{n} reference and {m} new runs are too few for a test at the {ALPHA:.0%} level")


def prediction_bound(reference, m, floor, statistic):
    """The value of one statistic, as a mean of m runs, below which it alone would be called a regression."""
    center, low, high = reference.mean(0), 0.0, 1.0

    def alarm(distance):
        new = center.copy()
        new[statistic] -= distance
        return permutation_test(reference, np.tile(new, (m, 1)), floor)[statistic] <= ALPHA

    step = max(reference[:, statistic].std(), floor[statistic])
    while not alarm(high * step) and high < 1e6:
        high *= 2
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if alarm(middle * step) else (middle, high)
    return center[statistic] - high * step
