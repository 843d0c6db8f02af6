"""Run a script over seeds and keep the runs as the reference that check.py compares with.

    python benchmark/run.py --list                                     # the settings there are
    python benchmark/run.py ppo_cartpole CartPole-v1 --seeds 1-20      # whole runs: curves/.../runs.csv, runs.json
    python benchmark/run.py ppo_cartpole --start --seeds 1-20          # first updates of all its settings: start.csv
    python benchmark/run.py ppo_cartpole CartPole-v1 --start           # of one

Ctrl-C stops it, and the same command goes on: finished runs are skipped, interrupted ones resumed. Run directories
are runs/benchmark/<script>/<setting>/seed_<k>; one that was made elsewhere can be put there. Those of another version
of the script, or of other flags, are refused unless --stale keeps them (they learn the same) or reruns them.
"""

import importlib.metadata
import json
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro
from check import UPDATES, play_starts
from reference import (
    CURVES,
    ROOT,
    Job,
    NotComparable,
    fail,
    last_line,
    machine,
    read_reference,
    read_run,
    script_hash,
    side_by_side,
    usable_cores,
    write_json,
    write_reference,
)


class Setting(NamedTuple):
    """One group of settings, with a folder of its own."""

    script: str
    name: str
    flags: str  # beyond the script's defaults
    frames: int = 0  # of one update, if its start is recorded
    check_seeds: int = 1  # how many seeds check.py --start plays


# "limits" is there for what the others never meet in three updates: time limits and, in CartPole's script, an
# entropy bonus.
SETTINGS = (
    Setting("ppo_cartpole", "CartPole-v1", "", 1024, check_seeds=3),
    Setting("ppo_cartpole", "Acrobot-v1",
            "--env-id Acrobot-v1 --gamma 0.99 --gae-lambda 0.95 --total-frames 200000", 1024),
    Setting("ppo_cartpole", "limits", "--env-id MountainCar-v0 --num-envs 8 --num-steps 256 --ent-coef 0.01", 2048),
    Setting("ppo_flappy", "200k", "--total-frames 200000", 2048),
    Setting("ppo_flappy", "limits", "--max-episode-steps 20 --eval-max-steps 20", 2048),
    Setting("ppo_flappy", "10M", "--total-frames 10000000"),
    Setting("ppo_atari", "RoadRunner-100k", "--env-id ALE/RoadRunner-v5 --total-frames 100000", 1024),
    Setting("ppo_atari", "Breakout", "--env-id ALE/Breakout-v5", 1024),
    Setting("ppo_atari", "Pong", "", 1024),
    Setting("ppo_atari", "Pong-3M", "--num-envs 16 --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4 "
            "--clip-coef 0.2 --ent-coef 0.003 --total-frames 3000000"),
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    script: Annotated[str, tyro.conf.Positional] = ""  # name of a script, without .py
    setting: Annotated[str, tyro.conf.Positional] = ""  # name of one of its settings
    seeds: str = "1-20"  # such as 1-20, or 1,2,5-7
    start: bool = False  # record the first updates of all settings of this script
    list: bool = False  # print the settings and leave
    jobs: int | None = None  # runs at a time, each on cores of its own; as many as there are cores by default
    stale: Literal["refuse", "keep", "rerun"] = "refuse"  # a run of another version of the script
    curves: Path = CURVES  # where the reference goes
    runs: Path = ROOT / "runs" / "benchmark"  # where the run directories go


def parse_seeds(text):
    """[1, 2, 3, 7] from "1-3,7"."""
    seeds = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            seeds += range(int(first), int(last or first) + 1)
        except ValueError:
            raise NotComparable(f"--seeds {text}: write them like 1-20 or 1,2,5-7") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise NotComparable(f"--seeds {text} names no seed, or one of them twice")
    return seeds


# ------------------------------------------------------------------------------------------------ running


def job_path(run_dir):
    """Where it stands how a run directory came about: beside it, since the script makes the directory."""
    return run_dir.with_name(run_dir.name + ".json")


def read_job(run_dir):
    path = job_path(run_dir)
    return json.loads(path.read_text()) if path.exists() else {}


def job_for(script, flags, seed, run_dir, stale):
    """The Job that starts one seed or resumes it; None if it is finished."""
    now = {"script_sha256": script_hash(script), "flags": list(flags)}
    job = read_job(run_dir)
    if job and stale != "keep" and {name: job[name] for name in now} != now:
        if stale == "refuse":
            raise NotComparable(f"{run_dir} is of another version of the script or its flags; see --stale")
        shutil.rmtree(run_dir, ignore_errors=True)
    if (run_dir / "result.json").exists():
        return None
    if any(run_dir.glob("**/*.msgpack")):
        command = ["--resume", str(run_dir)]
        job["resumed"] = True
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
        command, job = ["--seed", str(seed), "--run-dir", str(run_dir), *flags], now
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    write_json(job_path(run_dir), job)
    return Job([sys.executable, str(script), *command], run_dir)


def run_seeds(script, seeds, flags, runs, at_once=None, stale="refuse", say=print):
    """Run the seeds that are not finished, each in runs/seed_<k>. Returns {seed: exit code} of those that failed."""
    jobs = {seed: job_for(script, flags, seed, runs / f"seed_{seed}", stale) for seed in seeds}
    waiting, failed = {job.run_dir: seed for seed, job in jobs.items() if job}, {}
    at_once = max(1, min(at_once or len(usable_cores()), len(waiting)))
    say(f"{script.stem}: {len(seeds)} seeds, {len(waiting)} to run, {at_once} at once", flush=True)
    for job, code, seconds in side_by_side(filter(None, jobs.values()), at_once):
        seed, ended = waiting[job.run_dir], {"date": time.strftime("%Y-%m-%d"), "at_once": at_once}
        write_json(job_path(job.run_dir), read_job(job.run_dir) | ended)
        failed |= {seed: code} if code else {}
        ending = f"failed, exit code {code}: {last_line(job.log)}" if code else "finished"
        say(f"seed {seed} {ending}, {seconds:.0f} s", flush=True)
    return failed


# ------------------------------------------------------------------------------------------------- keeping


def about(script, flags, run, versions):
    """The head of runs.json or start.json."""
    head = {"script": script.stem, "flags": list(flags), "settings": run.settings, "versions": versions}
    return head | {"python": platform.python_version(), "machine": machine()}


def keep_runs(script, flags, run_dirs, folder):
    """Add finished runs, {seed: run directory}, to a folder of curves."""
    runs = {seed: read_run(run_dir) for seed, run_dir in run_dirs.items()}
    first = next(iter(runs.values()))
    meta, known = {"settings": first.settings, "seeds": {}}, []
    if (folder / "runs.json").exists():
        meta, known = read_reference(folder)
    for seed, run in runs.items():
        if run.seed != seed or run.settings != meta["settings"]:
            raise NotComparable(f"{run.name} has another seed, or other settings than the runs in {folder}")
        job = {"date": time.strftime("%Y-%m-%d"), "script_sha256": None} | read_job(run_dirs[seed])
        command = shlex.join(["python", script.name, "--seed", str(seed), *flags])
        entry = {name: job[name] for name in job if name != "flags"}
        meta["seeds"][str(seed)] = {"command": command} | entry | {"versions": run.versions}
    if len({entry["script_sha256"] for entry in meta["seeds"].values()}) > 1:
        print(f"note: the runs in {folder} are not all of the same version of the script")
    runs = {run.seed: run for run in known} | runs
    meta = about(script, flags, first, first.versions) | {"seeds": meta["seeds"]}
    write_reference(folder, "runs", meta, [runs[seed] for seed in sorted(runs)])


def record_starts(script, settings, seeds, curves):
    """Play the first updates of all settings, and write start.csv and start.json of each."""
    # A budget given twice is the last one.
    flags = {s.name: [*shlex.split(s.flags), "--total-frames", str(UPDATES * s.frames)] for s in settings}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        runs = play_starts(script, {name: (x, seeds) for name, x in flags.items()}, Path(folder))
    packages = ("jax", "flax", "optax", "gymnasium", "ale-py", "flappy-bird-gymnasium")
    versions = {name: importlib.metadata.version(name) for name in packages}
    for setting in settings:
        found = runs[setting.name]
        meta = about(script, flags[setting.name], found[0], versions) | {"check_seeds": setting.check_seeds}
        meta |= {"date": time.strftime("%Y-%m-%d"), "script_sha256": script_hash(script)}
        meta["seeds"] = {str(run.seed): {} for run in found}
        write_reference(curves / script.stem / setting.name, "start", meta, found)
        print(f"{len(found)} starts in {curves / script.stem / setting.name}")


def run(args):
    """Run and keep everything. Returns the exit code."""
    script, seeds = ROOT / f"{args.script}.py", parse_seeds(args.seeds)
    settings = [setting for setting in SETTINGS if setting.script == args.script]
    if not settings:
        raise NotComparable(f"there is no script {args.script or '(name one)'} in SETTINGS; see --list")
    if args.start:
        chosen = [x for x in settings if x.frames and args.setting in ("", x.name)]
        if not chosen:
            raise NotComparable(f"no start is recorded of {args.script} {args.setting}; see --list")
        record_starts(script, chosen, seeds, args.curves)
        return 0
    setting = next((setting for setting in settings if setting.name == args.setting), None)
    if not setting:
        raise NotComparable(f"{args.script} has no setting {args.setting or '(name one)'}; see --list")
    flags, runs = shlex.split(setting.flags), args.runs / args.script / args.setting
    failed = run_seeds(script, seeds, flags, runs, args.jobs, args.stale)
    run_dirs = {seed: runs / f"seed_{seed}" for seed in seeds if seed not in failed}
    if run_dirs:
        keep_runs(script, flags, run_dirs, args.curves / args.script / args.setting)
        print(f"{len(run_dirs)} runs in {args.curves / args.script / args.setting}")
    return 1 if failed else 0


def main(args=None):
    """Run a command line; returns the exit code."""
    args = tyro.cli(Args, args=args, description=__doc__)
    if args.list:
        print("\n".join(f"{setting.script} {setting.name}: {setting.flags or '(defaults)'}" for setting in SETTINGS))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: stop the runs in good order
    try:
        return run(args)
    except NotComparable as error:
        return fail(error)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
