"""Plant known faults in ppo_cartpole.py, one at a time: do the curves notice, or the unit tests, or nobody?

    python benchmark/faults.py                       # all that faults.csv lacks; about half an hour
    python benchmark/faults.py --only gamma-ignored  # one of them
    python benchmark/faults.py --list                # their names

A fault is a replacement in the text of the script that must match exactly once, so it cannot silently do
nothing. The faulty script plays 3 seeds with the default settings, and check.py compares them with the
reference curves; then the unit tests run against it. After Ctrl-C, the same command goes on. Rows of
faults.csv made from another version of the script, of the tests or of the reference curves are made again.
`none` is the control, the script as it is. It comes first, and where the unit tests fail with it, nothing
else is run: a fault would be found for a reason that is not its own.
"""

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from check import check
from reference import ALPHA, CURVES, HERE, ROOT, NotComparable
from run import run_seeds, script_hash

SCRIPT = "ppo_cartpole"
SEEDS = (101, 102, 103)  # none of the reference's
COLUMNS = ("fault", "what", "curves", "p", "statistic", "unit_test", "key")
# Left out: tests of this folder, of the other scripts and of the project (a fault in a function that
# they share would be "found" because the copies differ), and those that kill processes.
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-k", "not kill and not same_text")
LEFT_OUT = ("test_benchmark.py", "test_project.py", "test_flappy.py", "test_atari.py", "test_distributed.py")
FIRST = ("test_gae.py", "test_loss.py", "test_update.py", "test_rollout.py")  # quick, and of the algorithm


@dataclass(frozen=True)
class Fault:
    name: str
    what: str  # in words
    old: str  # occurs once in the script
    new: str


FAULTS = (
    Fault("none", "the script as it is", "", ""),
    Fault("reset-rows-not-masked", "rows in which the environment reset are learned from",
          "valid[t] = ~ended", "valid[t] = True"),
    Fault("truncation-as-termination", "a time limit counts as the end of all rewards",
          "ended = done[t] = terminated[t] | truncated",
          "ended = done[t] = terminated[t] = terminated[t] | truncated"),
    Fault("terminated-ignored", "termination is bootstrapped like a time limit",
          "deltas = rewards + gamma * next_values * (1.0 - terminated) - values",
          "deltas = rewards + gamma * next_values - values"),
    Fault("done-shifted", "the end of an episode is read one step late",
          "(deltas, done), reverse=True)", "(deltas, jnp.roll(done, 1, axis=0)), reverse=True)"),
    Fault("done-ignored", "advantages run on from one episode into the one before",
          "gamma * gae_lambda * (1.0 - ended) * advantage", "gamma * gae_lambda * advantage"),
    Fault("next-value-wrong", "the rollout is bootstrapped from the observation before the last",
          "apply_fn(state.params, next_obs)", "apply_fn(state.params, rollout.obs[-1])"),
    Fault("gamma-ignored", "rewards are not discounted",
          "rollout.done, config.gamma, config.gae_lambda", "rollout.done, 1.0, config.gae_lambda"),
    Fault("lambda-ignored", "lambda is 1 whatever the flag says",
          "rollout.done, config.gamma, config.gae_lambda", "rollout.done, config.gamma, 1.0"),
    Fault("target-without-advantage", "the value function is trained towards itself",
          "return advantages, advantages + values", "return advantages, values"),
    Fault("entropy-sign", "the entropy bonus is a penalty (no curve can tell: its weight is 0 by default)",
          "vf_coef * value_loss - ent_coef * entropy", "vf_coef * value_loss + ent_coef * entropy"),
    Fault("advantage-not-normalised", "advantages are used as they come",
          "advantage = batch.advantage - mean(batch.advantage)\n"
          "    advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8)\n",
          "advantage = batch.advantage\n"),
    Fault("ratio-not-clipped", "the surrogate is not clipped",
          "clipped_ratio = jnp.clip(ratio, 1.0 - clip_coef, 1.0 + clip_coef)", "clipped_ratio = ratio"),
    Fault("log-prob-of-another-action", "the stored log-probability is not that of the action taken",
          "take_along_axis(action_log_probs(logits), action[:, None], axis=-1)",
          "take_along_axis(action_log_probs(logits), 0 * action[:, None], axis=-1)"),
    Fault("one-minibatch", "every epoch learns from its first minibatch only",
          "order.reshape(config.update_epochs * config.num_minibatches, -1)",
          "order.reshape(config.update_epochs * config.num_minibatches, -1)[:: config.num_minibatches]"),
    Fault("permutation-reused", "all epochs of an update have the same minibatches",
          "axis=1, independent=True)", "axis=1, independent=False)"),
    Fault("learning-rate-not-annealed", "the learning rate stays",
          "return config.learning_rate * anneal_fraction(config, step // steps_per_update)",
          "return config.learning_rate"),
    Fault("learning-rate-annealed-per-minibatch", "the learning rate is 0 after the first two updates",
          "anneal_fraction(config, step // steps_per_update)", "anneal_fraction(config, step)"),
    Fault("clip-range-not-annealed", "the clip range stays",
          "minibatch, config.clip_coef * fraction,", "minibatch, config.clip_coef,"),
    Fault("adam-reset", "Adam forgets its averages and its count at every update",
          "minibatch_step, (state.params, state.opt_state), rows)",
          "minibatch_step, (state.params, optimizer.init(state.params)), rows)"),
    Fault("gradient-not-clipped", "the gradient's norm is not limited",
          "optax.clip_by_global_norm(config.max_grad_norm), optax.adam", "optax.adam"),
    Fault("hidden-layers-not-orthogonal", "the hidden layers start with the library's default",
          "nn.Dense(64, kernel_init=orthogonal(math.sqrt(2)))", "nn.Dense(64)"),
    Fault("policy-head-not-small", "the first policy is far from uniform",
          "MLP(self.num_actions, 0.01,", "MLP(self.num_actions, 1.0,"),
    Fault("action-key-reused", "every step of a rollout draws with the same random numbers",
          "key, action_key = jax.random.split(key)", "_, action_key = jax.random.split(key)"),
    Fault("env-seed-ignored", "the environments are not seeded",
          "obs, _ = envs.reset(seed=env_seed(config.seed, first))", "obs, _ = envs.reset()"),
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = ()  # names of faults, instead of all
    list: bool = False  # print the names and leave
    again: bool = False  # make rows again that are there
    jobs: int | None = None  # runs at a time; as many as there are cores by default
    curves: Path = CURVES  # the reference curves
    out: Path = HERE / "faults.csv"  # the result
    runs: Path = ROOT / "runs" / "benchmark" / "faults"  # where the faulty scripts and their runs go
    flags: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()  # what came after --, to try this out


def plant(fault, source):
    """The source with the fault in it. Raises ValueError unless its text is there exactly once."""
    if not fault.old:
        return source
    count = source.count(fault.old)
    if count != 1:
        raise ValueError(f"fault {fault.name}: its text occurs {count} times, not once: {fault.old!r}")
    return source.replace(fault.old, fault.new)


def by_curves(path, runs, args):
    """(yes or no, p, statistic): what check.py says of 3 seeds of the script at `path`."""
    failed = run_seeds(path, SEEDS, args.flags, runs, args.jobs)
    if failed:  # the script itself refuses to go on, such as when a loss is not finite
        return f"yes: exit code {sorted(failed.values())[0]}", "", ""
    answer = check([runs / f"seed_{seed}" for seed in SEEDS], args.curves)
    worst = min(answer["statistics"], key=lambda row: row["p_worse"])
    found = worst["p_worse"] <= ALPHA
    return "yes" if found else "no", f"{worst['p_worse']:.2g}", worst["statistic"] if found else ""


def used_tests(root):
    return [path for path in sorted((root / "tests").glob("*.py")) if path.name not in LEFT_OUT]


def by_unit_tests(folder):
    """The first test that fails with the script in `folder`, like "test_gae.py::test_one_step", or ""."""
    files = [path.name for path in used_tests(folder) if path.name.startswith("test_")]
    files = [name for name in FIRST if name in files] + [name for name in files if name not in FIRST]
    command = [sys.executable, "-m", "pytest", *PYTEST, *(f"tests/{name}" for name in files)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax-cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | cache, capture_output=True, text=True)
    (folder / "pytest.txt").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 and not found:
        raise RuntimeError(f"pytest did not run, exit code {done.returncode}: see {folder}/pytest.txt")
    return re.sub(r"\[.*", "", found[1])  # without the parameters


def lay_out(fault, folder):
    """Copy the scripts and their tests to `folder`, the fault planted. Returns the faulty script's path."""
    shutil.rmtree(folder / "tests", ignore_errors=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("ppo_*.py"), *ROOT.glob("pyproject.toml")]:
        shutil.copy(path, folder)
    path = folder / f"{SCRIPT}.py"
    path.write_text(plant(fault, path.read_text()))
    return path


def row_key(fault, args):
    """What a row depends on: the faulty script, the tests, the reference and the flags."""
    used = used_tests(ROOT) + sorted(args.curves.glob(f"{SCRIPT}/CartPole-v1/*.csv"))
    parts = [plant(fault, (ROOT / f"{SCRIPT}.py").read_text()).encode(), " ".join(args.flags).encode()]
    return hashlib.sha256(b"".join(parts + [path.read_bytes() for path in used])).hexdigest()[:12]


def read_rows(path):
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {row["fault"]: row for row in csv.DictReader(file)}


def write_rows(path, rows):
    """In the order of FAULTS."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[fault.name] for fault in FAULTS if fault.name in rows)


def main(args=None):
    """Run a command line; returns 1 if a fault got through or the curves accuse the control."""
    args = sys.argv[1:] if args is None else list(args)
    cut = args.index("--") if "--" in args else len(args)
    args = replace(tyro.cli(Args, args=args[:cut], description=__doc__), flags=tuple(args[cut + 1 :]))
    names = [fault.name for fault in FAULTS]
    unknown = set(args.only) - set(names)
    if args.list or unknown:
        print("\n".join(names))
        return 2 if unknown else 0
    source = (ROOT / f"{SCRIPT}.py").read_text()
    for fault in FAULTS:
        plant(fault, source)  # all of them match, or nothing is run
    rows = read_rows(args.out)
    try:
        for fault in FAULTS:
            key = row_key(fault, args)
            there = rows.get(fault.name, {}).get("key") == key and not args.again
            if there or (args.only and fault.name not in ("none", *args.only)):
                continue
            folder = args.runs / fault.name
            folder.mkdir(parents=True, exist_ok=True)
            path = lay_out(fault, folder)
            runs = folder / f"runs-{script_hash(path)}{''.join(args.flags)}"
            found, p, statistic = by_curves(path, runs, args)
            test = by_unit_tests(folder)
            cells = (fault.name, fault.what, found, p, statistic, test, key)
            rows[fault.name] = dict(zip(COLUMNS, cells))
            if fault.name == "none" and test:
                print(f"error: {test} fails without a fault: see {folder}/pytest.txt", file=sys.stderr)
                return 2
            write_rows(args.out, rows)
            print(f"{fault.name}: curves {found} (p = {p or '-'}), unit tests {test or 'no'}", flush=True)
    except NotComparable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    caught = {name: bool(row["unit_test"]) or row["curves"] != "no" for name, row in rows.items()}
    wrong = [name for name, found in caught.items() if found == (name == "none")]
    print(f"caught by neither, or accused without a fault: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
