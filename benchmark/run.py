"""Run a script over seeds and keep the reference curves of the runs.

    python benchmark/run.py --script ppo_cartpole --seeds 1-20                           # the defaults
    python benchmark/run.py --script ppo_cartpole --seeds 1-10 -- --env-id Acrobot-v1    # flags of the script
    python benchmark/run.py --script ppo_cartpole --seeds 1-3 --label slow -- --learning-rate 1e-4
    python benchmark/run.py --script ppo_flappy --seeds 1 --collect runs/NAME            # a run that exists

Ctrl-C stops it, and the same command goes on: finished runs are skipped, interrupted ones resumed.

Writes curves/<script>/<env>/: seed_<k>.csv (frames and mean return of the episodes that ended), results.csv
(the greedy evaluation of each seed) and meta.json (commands, settings, versions, machine, times). Settings
other than the defaults, --env-id apart, need a --label, which becomes part of the folder's name.
"""

import csv
import hashlib
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from reference import (
    CURVES,
    ROOT,
    differences,
    folder_name,
    machine,
    read_run,
    settings_of,
    usable_cores,
    write_curve,
    write_json,
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    script: str  # name of a script, without .py
    seeds: str  # such as 1-20, or 1,2,5-7
    jobs: int | None = None  # runs at a time, each on cores of its own; as many as there are cores by default
    label: str = ""  # name of settings that are not the defaults
    stale: Literal["refuse", "keep", "rerun"] = "refuse"  # a run by another version of the script, or its settings
    collect: tuple[Path, ...] = ()  # finished run directories, one for each seed: keep their curves, run nothing
    curves: Path = CURVES  # where the curves go
    runs: Path = ROOT / "runs" / "benchmark"  # where the run directories go
    flags: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()  # what came after --


class UsageError(ValueError):
    """The message says what is wrong, in one line."""


def parse_seeds(text):
    """[1, 2, 3, 7] from "1-3,7"."""
    seeds = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            seeds += range(int(first), int(last or first) + 1)
        except ValueError:
            raise UsageError(f"--seeds {text}: write them like 1-20 or 1,2,5-7") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text} names no seed, or one of them twice")
    return seeds


def script_hash(path):
    """Twelve hex digits of the script's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def expected_config(path, flags):
    """(config, defaults) as dicts: the settings of the script at `path` with these flags, and without."""
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    sys.path.pop(0)
    config = module.parse_args(list(flags))
    module.check_config(config)
    return asdict(config), asdict(module.Config())


# ------------------------------------------------------------------------------------------------ running


def read_job(run_dir):
    path = run_dir / "job.json"
    return json.loads(path.read_text()) if path.exists() else {}


def is_finished(run_dir):
    return (run_dir / "result.json").exists()


def why_stale(run_dir, config, sha):
    """Why a run directory is not a run of this script with this config; "" if it is one, or empty."""
    path = run_dir / "config.json"
    if not path.exists():
        return ""
    saved = json.loads(path.read_text())
    found = differences(settings_of(saved), settings_of(config))
    if found:
        return f"has other settings ({'; '.join(found)})"
    if read_job(run_dir).get("script_sha256") != sha:
        return "was started by another version of the script"
    return ""


def command_for(path, seed, flags, run_dir):
    """The command that starts one seed, resumes it, or starts it anew if it has no checkpoint yet."""
    if any(run_dir.glob("checkpoints/*.msgpack")):
        return [sys.executable, str(path), "--resume", str(run_dir)]
    shutil.rmtree(run_dir, ignore_errors=True)
    return [sys.executable, str(path), "--seed", str(seed), "--run-dir", str(run_dir), *flags]


def start(command, run_dir, cores):
    """Start a process that may use `cores` only; its output goes to run_dir/log.txt.

    XLA and BLAS make as many threads as they see cores. Two runs that both see all of them get in each
    other's way.
    """
    mine = usable_cores()
    pinned = hasattr(os, "sched_setaffinity")
    try:
        if pinned:
            os.sched_setaffinity(0, cores)  # inherited by the child; a preexec_fn would fork a process with threads
        with open(run_dir / "log.txt", "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    finally:
        if pinned:
            os.sched_setaffinity(0, mine)


def shares(cores, jobs):
    """The cores of each of `jobs` workers, as disjoint lists; more workers than cores share them."""
    if jobs >= len(cores):
        return [[cores[i % len(cores)]] for i in range(jobs)]
    return [cores[i::jobs] for i in range(jobs)]


def run_seeds(path, seeds, flags, runs, jobs=None, say=print):
    """Run the seeds that are not finished, each in runs/seed_<k>. Returns {seed: exit code} of the failed."""
    cores = usable_cores()
    jobs = max(1, min(jobs or len(cores), len(seeds)))
    free, running, failed = shares(cores, jobs), {}, {}
    waiting = [seed for seed in seeds if not is_finished(runs / f"seed_{seed}")]
    sha, total = script_hash(path), len(waiting)
    say(f"{path.stem}: {len(seeds)} seeds, {total} to run, {jobs} at once on {len(cores)} cores", flush=True)
    try:
        while waiting or running:
            while waiting and free:
                seed, mine = waiting.pop(0), free.pop(0)
                run_dir = runs / f"seed_{seed}"
                job = read_job(run_dir)
                command = command_for(path, seed, flags, run_dir)
                job = job if "--resume" in command else {}
                run_dir.mkdir(parents=True, exist_ok=True)
                job |= {"resumed": "--resume" in command}
                job = {"script_sha256": sha, "whole_seconds": 0.0, "jobs": jobs, "cores": len(mine)} | job
                write_json(run_dir / "job.json", job)
                running[start(command, run_dir, mine)] = seed, mine, time.monotonic()
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                seed, mine, began = running.pop(process)
                free.append(mine)
                note_end(runs / f"seed_{seed}", began)
                if process.returncode:
                    failed[seed] = process.returncode
                    say(f"seed {seed} failed, exit code {process.returncode}: see {runs}/seed_{seed}/log.txt")
                else:
                    say(f"seed {seed} finished, {total - len(waiting) - len(running)} of {total}", flush=True)
    except BaseException:  # Ctrl-C: the scripts save a checkpoint and leave, and so do we
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process, (seed, _, began) in running.items():
            process.wait()
            note_end(runs / f"seed_{seed}", began)
        raise
    return failed


def note_end(run_dir, began):
    """Add the seconds since `began` to what the run took so far as a whole process."""
    job = read_job(run_dir)
    job["whole_seconds"] = round(job["whole_seconds"] + time.monotonic() - began, 1)
    job["date"] = time.strftime("%Y-%m-%d")
    write_json(run_dir / "job.json", job)


# ------------------------------------------------------------------------------------------------- curves


def keep_curves(script, label, flags, config, run_dirs, curves, collected=False):
    """Write the curves of finished runs. run_dirs: {seed: run directory}. Returns the folder.

    Raises UsageError if the folder holds curves of other settings, or a run had other settings.
    """
    folder = curves / script / folder_name(config["env_id"], label)
    settings, meta_path = settings_of(config), folder / "meta.json"
    meta = json.loads(meta_path.read_text()) if meta_path.exists() else {"seeds": {}}
    if "settings" in meta and meta["settings"] != settings:
        found = differences(settings, meta["settings"]) or [f"{set(settings) ^ set(meta['settings'])}"]
        what = f"{folder} holds curves of other settings ({'; '.join(found)})"
        raise UsageError(f"{what}; give these a --label, or remove that folder to begin it anew")
    results_path = folder / "results.csv"
    results = {}
    if results_path.exists():
        with open(results_path, newline="") as file:
            results = {int(row["seed"]): row for row in csv.DictReader(file)}
    finished = {seed: read_run(run_dir) for seed, run_dir in run_dirs.items()}
    for run in finished.values():
        if found := differences(run.settings, settings):
            raise UsageError(f"{run.name} was run with other settings ({'; '.join(found)}); give its flags after --")
    for seed, run_dir in run_dirs.items():
        run, job = finished[seed], read_job(run_dir)
        if meta["seeds"] and meta.get("versions", run.versions) != run.versions:
            print(f"note: seed {seed} ran with {run.versions}, the others with {meta['versions']}")
        write_curve(folder / f"seed_{seed}.csv", run)
        row = {name: x for name, x in run.result.items() if type(x) in (int, float) and name != "seed"}
        results[seed] = {"seed": seed} | row
        command = shlex.join(["python", f"{script}.py", "--seed", str(seed), *flags])
        entry = {"command": command, "date": job.get("date") or day_of(run_dir)}
        entry |= {"seconds": run.result["seconds"]} | {name: x for name, x in job.items() if name != "date"}
        entry |= {"device": run.result.get("device"), "versions": run.versions}
        meta["seeds"][str(seed)] = entry | ({"collected": True} if collected else {})
        meta = {"script": script, "env_id": config["env_id"], "label": label, "settings": settings} | {
            "versions": run.versions, "python": platform.python_version(), "machine": machine(),
            "seeds": {key: meta["seeds"][key] for key in sorted(meta["seeds"], key=int)},
        }  # fmt: skip
    with open(results_path, "w", newline="") as file:
        columns = list(dict.fromkeys(name for row in results.values() for name in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(results[seed] for seed in sorted(results))
    write_json(meta_path, meta)
    if len({entry.get("script_sha256") for entry in meta["seeds"].values()}) > 1:
        print(f"note: the seeds in {folder} were not all run by the same version of the script")
    return folder


def day_of(run_dir):
    return time.strftime("%Y-%m-%d", time.localtime((run_dir / "result.json").stat().st_mtime))


def collect(args, seeds):
    """{seed: run directory} of args.collect. Raises UsageError unless they are the seeds that were named."""
    run_dirs = {read_run(run_dir).seed: run_dir for run_dir in args.collect}
    if sorted(run_dirs) != sorted(seeds):
        raise UsageError(f"--collect names runs of the seeds {sorted(run_dirs)}, --seeds those of {sorted(seeds)}")
    return run_dirs


def run(args):
    """Run and keep everything. Returns the exit code."""
    path = ROOT / f"{args.script}.py"
    if not path.exists():
        raise UsageError(f"--script {args.script}: there is no {path.name}")
    seeds, (config, defaults) = parse_seeds(args.seeds), expected_config(path, args.flags)
    own = {"env_id"}  # this the folder's name says
    changed = [name for name, x in settings_of(config).items() if x != defaults[name] and name not in own]
    if changed and not args.label:
        raise UsageError(f"{', '.join(changed)} not at the default: give these settings a name with --label")
    if args.collect:
        run_dirs, failed = collect(args, seeds), {}
    else:
        runs = args.runs / args.script / folder_name(config["env_id"], args.label)
        for seed in seeds:
            run_dir = runs / f"seed_{seed}"
            why = why_stale(run_dir, config, script_hash(path))
            if why and args.stale == "refuse":
                raise UsageError(f"{run_dir} {why}; --stale rerun runs it again, --stale keep takes it as it is")
            if why and args.stale == "rerun":
                shutil.rmtree(run_dir)
        failed = run_seeds(path, seeds, args.flags, runs, args.jobs)
        run_dirs = {seed: runs / f"seed_{seed}" for seed in seeds if seed not in failed}
    if run_dirs:
        folder = keep_curves(args.script, args.label, args.flags, config, run_dirs, args.curves, bool(args.collect))
        print(f"{len(run_dirs)} curves in {folder}")
    return 1 if failed else 0


def main(args=None):
    """Run a command line; returns the exit code."""
    args = sys.argv[1:] if args is None else list(args)
    cut = args.index("--") if "--" in args else len(args)
    args = replace(tyro.cli(Args, args=args[:cut], description=__doc__), flags=tuple(args[cut + 1 :]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: stop the runs in good order
    try:
        return run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
