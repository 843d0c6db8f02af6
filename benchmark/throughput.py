"""How long a whole run takes, beside Stable-Baselines3 and SBX on the same machine, and where the time goes.

    python -m venv peers && peers/bin/pip install -r benchmark/requirements.txt
    python benchmark/throughput.py --peers-python peers/bin/python          # CartPole, some ten minutes
    python benchmark/throughput.py --repeats 0 --breakdown ppo_flappy -- --total-frames 20480
    python benchmark/plot.py                                                # the tables in README.md

Whole processes: from the start of Python to its end, with imports, compiling, training, the greedy evaluation
of 20 episodes and, for ours, checkpoints, TensorBoard and agent.gif too. The programs alternate, so that
a slow moment of the machine meets all of them. Writes throughput.json. Close everything else first.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from reference import HERE, ROOT, machine, peak_mib, write_json

# What the RL Zoo's settings for CartPole (see peer.py) are in the flags of ppo_cartpole.py.
ZOO = ("--num-envs", "8", "--num-steps", "32", "--num-minibatches", "1", "--update-epochs", "20",
       "--learning-rate", "1e-3", "--gamma", "0.98", "--gae-lambda", "0.8", "--clip-coef", "0.2",
       "--vf-coef", "0.5", "--ent-coef", "0")  # fmt: skip


@dataclass(frozen=True)
class Args:
    peers_python: Path | None = None  # the interpreter of the environment with the peers; none: ours alone
    repeats: int = 5  # runs of each program, with seeds 1, 2, ...; 0: only the breakdown
    total_frames: int = 100_000  # of every program
    breakdown: tuple[str, ...] = ("ppo_cartpole",)  # scripts whose time is taken apart; flags for them come after --
    out: Path = HERE / "throughput.json"  # the result; what is not measured now stays as it was
    take_apart: str = ""  # used by this program itself: measure this script in this process, print JSON


# ---------------------------------------------------------------------------------------- whole processes


def programs(args):
    """{name: function of (seed, run directory) that gives a command}."""
    ours = [sys.executable, str(ROOT / "ppo_cartpole.py"), "--total-frames", str(args.total_frames)]

    def our(*flags):
        return lambda seed, run_dir: [*ours, "--seed", str(seed), "--run-dir", str(run_dir), *flags]

    def peer(library):
        command = [
            str(args.peers_python),
            str(HERE / "peer.py"),
            library,
            "--total-frames",
            str(args.total_frames),
        ]
        return lambda seed, run_dir: [*command, "--seed", str(seed)]

    found = {"`ppo_cartpole.py`": our(), "`ppo_cartpole.py`, RL Zoo settings": our(*ZOO)}
    if args.peers_python:
        found |= {"SBX, RL Zoo settings": peer("sbx"), "Stable-Baselines3, RL Zoo settings": peer("sb3")}
    return found


def measure(command, run_dir):
    """Run a command to its end. Returns (seconds, peak memory in MiB, mean greedy return)."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # the only wait that tells this child's peak memory
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-2000:]}")
    result = run_dir / "result.json"
    if result.exists():
        value = json.loads(result.read_text())["eval_return_mean"]
    else:
        value = json.loads(text.strip().splitlines()[-1])["eval_return"]
    return seconds, peak_mib(usage), value


def compare(args):
    """Run all programs `repeats` times, in turn. Returns what throughput.json holds of them."""
    runs = {name: [] for name in programs(args)}
    for seed in range(1, args.repeats + 1):
        for name, command in programs(args).items():
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                run_dir = Path(folder) / "run"
                runs[name].append(measure(command(seed, run_dir), run_dir))
            print(f"{name}: {runs[name][-1][0]:.1f} s, return {runs[name][-1][2]:.1f}", flush=True)
    first = next(iter(runs.values()))
    rows = {}
    for name, found in runs.items():
        seconds, peak, value = (statistics.median(column) for column in zip(*found))
        # The median of ratios within a round: what slowed down a whole round cancels.
        ratio = statistics.median(mine[0] / base[0] for mine, base in zip(found, first))
        rows[name] = {
            "seconds": round(seconds, 2),
            "frames_per_second": round(args.total_frames / seconds, 1),
        }
        rows[name] |= {"ratio": round(ratio, 3), "peak_mib": round(peak, 1), "eval_return": round(value, 1)}
        rows[name]["all_seconds"] = [round(run[0], 2) for run in found]
    about = {"env_id": "CartPole-v1", "frames": args.total_frames, "repeats": args.repeats}
    about |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    return about | {"programs": rows}


# ---------------------------------------------------------------------------------------------- breakdown


class Stopwatch:
    """Seconds by name; a timed function inside a timed function counts for the outer one alone."""

    def __init__(self):
        self.seconds, self.busy = {}, False

    def timed(self, name, function, finish=lambda result: result):
        """`function`, with its time added to `name`. finish: waits until the result is really there."""

        def wrapper(*args, **kwargs):
            if self.busy:
                return function(*args, **kwargs)
            self.busy, began = True, time.perf_counter()
            try:
                return finish(function(*args, **kwargs))
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
                self.busy = False

        return wrapper


class TimedEnvs:
    """Vector environments whose steps are timed."""

    def __init__(self, envs, stopwatch):
        self.envs, self.step = envs, stopwatch.timed("environment", envs.step)

    def __getattr__(self, name):
        return getattr(self.envs, name)


def take_apart(script, flags):
    """Train with the script's own functions, timed. Returns {"frames": int, "seconds": {part: seconds}}.

    Python itself is not in it. JAX works in the background; here every call is waited for, which the
    script does anyway: it reads each action, and the metrics of each update.
    """
    watch, began = Stopwatch(), time.perf_counter()
    sys.path.insert(0, str(ROOT))
    module = watch.timed("imports", importlib.import_module)(script)
    import jax

    def compile_timed(config, envs):
        init_fn, act_fn, update_fn = compile_functions(config, envs)
        act_fn = watch.timed("policy", act_fn, jax.block_until_ready)
        return init_fn, act_fn, watch.timed("update", update_fn, jax.block_until_ready)

    compile_functions = watch.timed("compile", module.compile_functions)
    make_envs = module.make_envs
    module.compile_functions = compile_timed
    module.make_envs = lambda *args, **kwargs: TimedEnvs(make_envs(*args, **kwargs), watch)
    for name, part in (
        ("evaluate", "evaluation"),
        ("record_gif", "agent.gif"),
        ("save_checkpoint", "checkpoints"),
    ):
        setattr(module, name, watch.timed(part, getattr(module, name)))
    module.Recorder.record = watch.timed("metrics and TensorBoard", module.Recorder.record)
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        config = module.parse_args([*flags, "--run-dir", str(Path(folder) / "run")])
        result = module.train(config)
    rest = time.perf_counter() - began - sum(watch.seconds.values())
    order = ("imports", "compile", "environment", "policy", "update", "metrics and TensorBoard",
             "checkpoints", "evaluation", "agent.gif")  # fmt: skip
    seconds = {part: round(watch.seconds.get(part, 0.0), 3) for part in order} | {"all else": round(rest, 3)}
    return {
        "frames": result["frames"],
        "flags": list(flags),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "seconds": seconds,
    }


def take_apart_afresh(script, flags):
    """`take_apart` in a process of its own, so that the imports are in it."""
    command = [sys.executable, __file__, "--take-apart", script, "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(args=None):
    """Run a command line; returns the exit code."""
    args = sys.argv[1:] if args is None else list(args)
    cut = args.index("--") if "--" in args else len(args)
    flags = tuple(args[cut + 1 :])
    args = tyro.cli(Args, args=args[:cut], description=__doc__)
    if args.take_apart:
        print(json.dumps(take_apart(args.take_apart, flags)))
        return 0
    if args.peers_python and not args.peers_python.exists():
        print(f"error: --peers-python {args.peers_python} is not there", file=sys.stderr)
        return 2
    content = json.loads(args.out.read_text()) if args.out.exists() else {"programs": {}}
    if args.repeats:
        content |= compare(args)
        write_json(args.out, content)
    for script in args.breakdown:
        content.setdefault("breakdown", {})[script] = take_apart_afresh(script, flags)
        print(f"{script}: {content['breakdown'][script]['seconds']}", flush=True)
        write_json(args.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
