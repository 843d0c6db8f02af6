"""What the programs of this folder share: runs on disk, side by side on the cores of this machine, and tables.

A folder curves/<script>/<name>/ holds what is known of one group of settings:
  runs.csv, runs.json    whole runs of several seeds: metrics.csv of each, and how all of it came about
  start.csv, start.json  the first three updates of several seeds, in the same form
Needs NumPy alone, so that check.py begins quickly and speed.py runs in other environments too.
"""

import csv
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CURVES = HERE / "curves"
MAX_ROWS = 200  # of a run on disk: a longer one keeps means over several updates
TIMES = ("seconds", "charts/SPS")  # columns of metrics.csv that say nothing about learning
# They do not change what is learned.
NOT_SETTINGS = ("seed", "run_dir", "resume", "evaluate", "checkpoint_every", "distributed", "coordinator_address",
                "num_processes", "process_id")  # fmt: skip


class Run(NamedTuple):
    """What is kept of one run."""

    name: str
    seed: int
    columns: dict  # {name of metrics.csv, "frames" first: float [R]}; NaN where a cell is empty
    result: dict  # the numbers of result.json: seconds, eval_return_mean, ...; {} of a start
    settings: dict  # config.json without NOT_SETTINGS
    versions: dict  # of the packages that it ran with


class NotComparable(ValueError):
    """Wrong input: there is nothing to compare or keep; the message says why, in one line."""


# ------------------------------------------------------------------------------------- reading and writing


def differences(settings, other):
    """["name: a, not b"] of the settings that both have and that differ."""
    shared = [name for name in settings if name in other]
    return [f"{name}: {settings[name]}, not {other[name]}" for name in shared if settings[name] != other[name]]


def read_table(path):
    """{column: float [R]} of a CSV file of numbers; NaN where a cell is empty."""
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise NotComparable(f"{path} has no rows, or a row that breaks off")
    return dict(zip(rows[0], np.array([[float(cell or "nan") for cell in row] for row in rows[1:]]).T))


def compact(columns):
    """The columns with at most MAX_ROWS rows, each the mean of as many as it takes; rounded like a file's cells."""
    size = math.ceil(len(columns["frames"]) / MAX_ROWS)
    edges = range(0, len(columns["frames"]), size)

    def mean(part):
        part = part[~np.isnan(part)]
        return float(f"{part.mean():.6g}") if len(part) else np.nan

    rows = {name: np.array([mean(x[i : i + size]) for i in edges]) for name, x in columns.items()}
    return rows | {"frames": np.array([columns["frames"][i : i + size][-1] for i in edges])}


def read_run(run_dir, whole=True):
    """The Run in a run directory of a script; not whole: one that was stopped. Raises NotComparable."""
    run_dir = Path(run_dir)
    try:
        config = json.loads((run_dir / "config.json").read_text())
        result = json.loads((run_dir / "result.json").read_text()) if whole else {}
        columns = {name: x for name, x in read_table(run_dir / "metrics.csv").items() if name not in TIMES}
        versions, seed = result.get("versions", {}), config["seed"]
        numbers = {name: x for name, x in result.items() if type(x) in (int, float) and name != "seed"}
        if whole and not math.isfinite(numbers["eval_return_mean"]):
            raise ValueError(f"the evaluation gave {numbers['eval_return_mean']}")
        columns = compact({"frames": columns["frames"]} | columns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotComparable(f"{run_dir} is not a finished run of these scripts: {error!r}") from None
    settings = {name: value for name, value in config.items() if name not in NOT_SETTINGS}
    return Run(str(run_dir), seed, columns, numbers, settings, versions)


def read_reference(folder, kind="runs"):
    """(meta, list of Run in the order of seeds) of a folder of curves; kind: "runs" or "start"."""
    meta, table = json.loads((folder / f"{kind}.json").read_text()), read_table(folder / f"{kind}.csv")
    seeds, runs = table.pop("seed"), []
    for seed in sorted(map(int, meta["seeds"])):
        columns = {name: x[seeds == seed] for name, x in table.items()}
        result = meta["seeds"][str(seed)]["result"]
        runs.append(Run(f"seed {seed}", seed, columns, result, meta["settings"], meta["versions"]))
    return meta, runs


def write_reference(folder, kind, meta, runs):
    """Both files of a kind. meta["seeds"] says how each run came about; its numbers are added here."""
    for run in runs:
        meta["seeds"][str(run.seed)]["result"] = run.result
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    lines = [["seed", *names]]
    for run in runs:
        gap = np.full(len(run.columns["frames"]), np.nan)
        cells = [[f"{x:.10g}" if x == x else "" for x in run.columns.get(name, gap)] for name in names]
        lines += zip([run.seed] * len(gap), *cells)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{kind}.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    write_json(folder / f"{kind}.json", meta)


def write_json(path, content):
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def references(curves=CURVES, kind="runs", script="*"):
    """The folders that hold reference runs, or recorded starts."""
    return sorted(path.parent for path in Path(curves).glob(f"{script}/*/{kind}.json"))


def script_hash(path):
    """Twelve hex digits of the script's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------- machine


def usable_cores():
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine():
    """What a time depends on, without naming the host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": len(usable_cores()), "system": platform.system()}


class Job(NamedTuple):
    """A process to run."""

    command: list
    run_dir: Path  # which the process makes

    @property
    def log(self):
        """Its output, beside the run directory."""
        return self.run_dir.with_name(self.run_dir.name + ".log")


def start_process(job, cores):
    """Start a process that may use `cores` only: two that both see all of them get in each other's way."""
    mine, pinned = usable_cores(), hasattr(os, "sched_setaffinity")
    try:
        if pinned:
            os.sched_setaffinity(0, cores)  # inherited by the child; a preexec_fn would fork a process with threads
        with open(job.log, "a") as log:
            return subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT)
    finally:
        if pinned:
            os.sched_setaffinity(0, mine)


def side_by_side(jobs, at_once=None):
    """Run jobs, each on cores of its own, `at_once` (as many as there are cores) at a time.

    Yields (job, exit code, seconds) of each that ended. If the caller stops or is interrupted, the processes get
    SIGTERM, on which the scripts leave in good order.
    """
    cores, waiting, running = usable_cores(), list(jobs), {}
    at_once = max(1, min(at_once or len(cores), len(waiting)))
    free = [cores[i::at_once] or [cores[i % len(cores)]] for i in range(at_once)]
    try:
        while waiting or running:
            while waiting and free:
                job, mine = waiting.pop(0), free.pop(0)
                job.run_dir.parent.mkdir(parents=True, exist_ok=True)
                running[start_process(job, mine)] = job, mine, time.monotonic()
            time.sleep(0.05)
            for process, (job, mine, began) in list(running.items()):
                if process.poll() is not None:
                    del running[process]
                    free.append(mine)
                    yield job, process.returncode, time.monotonic() - began
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def last_line(path):
    """The last line of a log: what a process that failed said about it."""
    return (path.read_text().strip().splitlines() or ["(it said nothing)"])[-1]


# -------------------------------------------------------------------------------------------------- words


def number(x):
    return "empty" if math.isnan(x) else f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"


def fail(error):
    """One line on stderr; returns the exit code of wrong input."""
    print(f"error: {error}", file=sys.stderr)
    return 2
