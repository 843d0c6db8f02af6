"""Plant known faults in the scripts, one at a time: do the starts notice, finished runs, the unit tests, or nobody?

    python benchmark/faults.py ppo_cartpole                       # all that faults.json lacks of one script
    python benchmark/faults.py ppo_flappy --only gamma-ignored    # one fault
    python benchmark/faults.py ppo_atari --parts start            # by the starts alone

A fault is a replacement in the text of a script that must match exactly once, so it cannot silently do nothing.
Start: check.py --start on the faulty script. Shape: check.py on 3 finished runs; on pixels only what the start has
not seen, since these take minutes. Tests: the unit tests, up to the first that fails. `none` is the script as it is.

After Ctrl-C, the same command goes on. What was found with another version of the script, of the tests or of the
reference is found again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from check import ALPHA, check_runs, check_start
from reference import CURVES, HERE, ROOT, NotComparable, fail, number, references, write_json
from run import run_seeds

SHAPES = {"ppo_cartpole": "CartPole-v1", "ppo_flappy": "200k", "ppo_atari": "RoadRunner-100k"}  # by finished runs
SEEDS = (101, 102, 103)  # none of the reference's
# Left out: tests of this folder and of the project (a fault in a function that scripts share would be "found"
# because the copies differ), and those that start several processes or kill them.
LEFT_OUT = ("test_benchmark.py", "test_project.py", "test_distributed.py")
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-k", "not kill")
FIRST = ("test_gae.py", "test_loss.py", "test_update.py", "test_rollout.py")  # quick, and of the algorithm


class Fault(NamedTuple):
    """A text that occurs once in each of its scripts, and what takes its place. One name may have several."""

    scripts: str  # initials: c, f, a
    name: str
    what: str
    old: str
    new: str


FAULTS = (
    Fault("cfa", "none", "the script as it is", "", ""),
    # Environments, rollouts, ends of episodes.
    Fault("cf", "reset-rows-not-masked", "rows in which the environment reset are learned from",
          "jax.device_get(choice), ~ended", "jax.device_get(choice), ended | True"),
    Fault("a", "reset-rows-not-masked", "rows in which the game reset are learned from",
          "decided = ~(self.game_over | self.press)", "decided = ~self.press"),
    Fault("cf", "truncation-as-termination", "a time limit counts as the end of all rewards",
          "np.float32(reward), terminated, ended", "np.float32(reward), ended, ended"),
    Fault("a", "truncation-as-termination", "a time limit, which no game here meets, counts as the end of rewards",
          "terminated, terminated | truncated, info", "terminated | truncated, terminated | truncated, info"),
    Fault("cfa", "terminated-ignored", "termination is bootstrapped like a time limit",
          "jnp.where(terminated, 0.0, next_values)", "next_values"),
    Fault("cfa", "done-shifted", "the end of an episode is read one step late",
          "(deltas, done), reverse=True)", "(deltas, jnp.roll(done, 1, axis=0)), reverse=True)"),
    Fault("cfa", "done-ignored", "advantages run on from one episode into the one before",
          "jnp.where(ended, 0.0, advantage)", "advantage"),
    Fault("cfa", "next-value-wrong", "the rollout is bootstrapped from the observation before the last",
          "apply_fn(state.params, next_obs)", "apply_fn(state.params, rollout.obs[-1])"),
    Fault("cfa", "action-key-reused", "every step of a rollout draws with the same random numbers",
          "key, action_key = jax.random.split(key)", "_, action_key = jax.random.split(key)"),
    Fault("cfa", "env-seed-ignored", "the environments have the same seed in every run",
          "obs, _ = envs.reset(seed=env_seed(config.seed, first)", "obs, _ = envs.reset(seed=env_seed(7, first)"),
    Fault("cfa", "log-prob-of-another-action", "the stored log-probability is not that of the action taken",
          "policy.log_prob(action), value", "policy.log_prob(0 * action), value"),
    # Advantages and the loss.
    Fault("cfa", "gamma-ignored", "rewards are not discounted",
          "*ends, config.gamma, config.gae_lambda", "*ends, 1.0, config.gae_lambda"),
    Fault("cfa", "lambda-ignored", "lambda is 1 whatever the flag says",
          "*ends, config.gamma, config.gae_lambda", "*ends, config.gamma, 1.0"),
    Fault("cfa", "target-without-advantage", "the value function is trained towards itself",
          "return advantages, advantages + values", "return advantages, values"),
    Fault("cfa", "entropy-sign", "the entropy bonus is a penalty",
          '- ent_coef * metrics["entropy"]', '+ ent_coef * metrics["entropy"]'),
    Fault("cfa", "advantage-not-normalised", "advantages are used as they come",
          "advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8 * (1.0 + jnp.abs(center)))",
          "advantage = batch.advantage"),
    Fault("cfa", "ratio-not-clipped", "the surrogate is not clipped",
          "clipped_ratio = jnp.clip(ratio, 1.0 - clip_coef, 1.0 + clip_coef)", "clipped_ratio = ratio"),
    # Minibatches and the optimizer.
    Fault("cf", "one-minibatch", "every epoch learns from its first minibatch only",
          "order.reshape(config.update_epochs * config.num_minibatches, -1)",
          "order.reshape(config.update_epochs * config.num_minibatches, -1)[:: config.num_minibatches]"),
    Fault("a", "one-minibatch", "every epoch learns from its first minibatch only",
          "order.reshape(config.update_epochs * config.num_minibatches, config.num_envs, -1)",
          "order.reshape(config.update_epochs * config.num_minibatches, config.num_envs, -1)"
          "[:: config.num_minibatches]"),
    Fault("cf", "permutation-reused", "all epochs of an update have the same minibatches",
          "axis=1, independent=True)", "axis=1, independent=False)"),
    Fault("a", "permutation-reused", "all epochs and environments have the same minibatches",
          "axis=2, independent=True)", "axis=2, independent=False)"),
    Fault("cfa", "learning-rate-not-annealed", "the learning rate stays",
          " * config.annealed(step // minibatches)", ""),
    Fault("cfa", "learning-rate-annealed-per-minibatch", "the learning rate is 0 after the first updates",
          "config.annealed(step // minibatches)", "config.annealed(step)"),
    Fault("cfa", "clip-range-not-annealed", "the clip range stays",
          "config.clip_coef * fraction, config.vf_coef", "config.clip_coef, config.vf_coef"),
    Fault("cfa", "adam-reset", "Adam forgets its averages and its count at every update",
          "minibatch_step, (state.params, state.opt_state), rows)",
          "minibatch_step, (state.params, optimizer.init(state.params)), rows)"),
    Fault("cfa", "gradient-not-clipped", "the gradient's norm is not limited",
          "optax.clip_by_global_norm(config.max_grad_norm)", "optax.identity()"),
    # Networks.
    Fault("c", "hidden-layers-not-orthogonal", "the hidden layers start with the library's default",
          "nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))", "nn.Dense(64)"),
    Fault("f", "hidden-layers-not-orthogonal", "the hidden layer starts with the library's default",
          "nn.Dense(256, kernel_init=init)", "nn.Dense(256)"),
    Fault("a", "hidden-layers-not-orthogonal", "the hidden layer starts with the library's default",
          "nn.Dense(512, kernel_init=init)", "nn.Dense(512)"),
    Fault("c", "policy-head-not-small", "the first policy is far from uniform",
          "mlp(self.num_actions, 0.01)", "mlp(self.num_actions, 1.0)"),
    Fault("fa", "policy-head-not-small", "the first policy is far from uniform",
          "orthogonal(0.01)", "orthogonal(1.0)"),
    # Pixels.
    Fault("f", "reward-scale-ignored", "the learner sees the game's own rewards",
          "config.reward_scale * rollout.reward", "1.0 * rollout.reward"),
    Fault("fa", "never-scaled", "pixels are not divided by 255",
          "obs.astype(jnp.float32) * (1 / 255)", "obs.astype(jnp.float32)"),
    Fault("fa", "scaled-twice", "pixels are divided by 255 twice",
          "obs.astype(jnp.float32) * (1 / 255)", "obs.astype(jnp.float32) * (1 / 255) * (1 / 255)"),
    Fault("f", "stack-reversed", "the newest picture comes first",
          "self.pictures >> 8 | self.draw() << 24", "self.pictures << 8 | self.draw()"),
    Fault("a", "stack-reversed", "the newest picture comes first",
          "np.stack(obs.swapaxes(0, 1), axis=-1)", "np.stack(obs.swapaxes(0, 1)[::-1], axis=-1)"),
    Fault("fa", "kernel-transposed", "the pixels of a kernel are in another order than those of a patch",
          "kernel.reshape(n, stride, n, stride, c, f).swapaxes(1, 2)", "kernel.reshape(n, stride, n, stride, c, f)"),
    Fault("fa", "part-left-out", "the gradient lacks one part of the minibatch",
          "PART_ROWS * jnp.arange(num_parts)", "PART_ROWS * jnp.arange(1, num_parts)"),
    Fault("f", "frame-skip-of-one", "every frame of the game is a decision",
          "for frame in range(self.frame_skip)", "for frame in range(1)"),
    Fault("f", "flap-on-skipped-frames", "a flap acts on each of the skipped frames",
          "int(action) if frame == 0 else 0", "int(action)"),
    Fault("f", "lidar-on", "the game's lidar is on, which changes the reward", "use_lidar=False", "use_lidar=True"),
    Fault("f", "one-seed-for-all", "all environments play the same game",
          "super().reset(seed=seed, options=options)", "super().reset(seed=[seed] * self.num_envs, options=options)"),
    Fault("a", "frame-skip-of-one", "every frame of the emulator is a decision",
          "reward_clipping=False,", "reward_clipping=False, frameskip=1,"),
    Fault("a", "no-maximum-of-frames", "pictures are of one frame, not of two",
          "reward_clipping=False,", "reward_clipping=False, maxpool=False,"),
    Fault("a", "no-noop-starts", "all games begin alike",
          "reward_clipping=False,", "reward_clipping=False, noop_max=0,"),
    Fault("a", "clipped-returns-logged", "the returns in the log are of clipped rewards",
          "reward_clipping=False,", "reward_clipping=True,"),
    Fault("a", "rewards-not-clipped", "the learner sees the game's own rewards", "np.sign(reward)", "reward"),
    Fault("a", "life-loss-as-reset", "the row after a lost life is masked like a reset",
          'info["lives"].copy(), game_over | truncated', 'info["lives"].copy(), game_over | truncated | life_lost'),
    Fault("a", "life-loss-ignored", "the loss of a life is no termination",
          "game_over | life_lost, truncated & ~life_lost, info", "game_over, truncated, info"),
    Fault("a", "fire-not-masked", "the row in which FIRE was pressed is learned from",
          "decided = ~(self.game_over | self.press)", "decided = ~self.game_over"),
    Fault("a", "fire-not-pressed", "after a lost life, nobody presses FIRE",
          "np.where(self.press, self.fire or 0, actions)", "np.where(self.press, actions, actions)"),
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    script: Annotated[str, tyro.conf.Positional]  # name of a script, without .py
    only: tuple[str, ...] = ()  # names of faults, instead of all
    parts: tuple[str, ...] = ("start", "shape", "tests")  # by whom they may be seen
    curves: Path = CURVES  # the reference
    out: Path = HERE / "faults.json"  # the result
    runs: Path = ROOT / "runs" / "benchmark" / "faults"  # where the faulty scripts and their runs go


def faults_of(script):
    return [fault for fault in FAULTS if script.removeprefix("ppo_")[0] in fault.scripts]


def plant(fault, source):
    """The source with the fault in it. Raises NotComparable unless its text is there exactly once."""
    if not fault.old:
        return source
    if source.count(fault.old) != 1:
        times = f"{source.count(fault.old)} times, not once"
        raise NotComparable(f"fault {fault.name}: its text occurs {times}: {fault.old!r}")
    return source.replace(fault.old, fault.new)


def lay_out(fault, script, folder):
    """Copy the scripts and their tests to `folder`, the fault planted. Returns the faulty script's path."""
    shutil.rmtree(folder / "tests", ignore_errors=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", *LEFT_OUT))
    for path in [*ROOT.glob("ppo_*.py"), *ROOT.glob("pyproject.toml")]:
        shutil.copy(path, folder)
    path = folder / f"{script}.py"
    path.write_text(plant(fault, path.read_text()))
    return path


# --------------------------------------------------------------------------------------------- who sees it


def by_start(path, folder, args):
    """(seen, how) by check.py --start."""
    try:
        answer = check_start(path, args.curves)
    except NotComparable as error:  # the script itself refuses to go on, such as when a loss is not finite
        return True, f"stops: {error}"[:150]
    settings = answer["settings"].items()
    apart = [(row, name) for name, found in settings for rows in found["apart"].values() for row in rows]
    if not apart:
        return False, ""
    row, name = min(apart, key=lambda pair: (pair[0]["update"], -pair[0]["difference"]))
    p = min((found["strangest"]["p"] for _, found in settings if found["strangest"]), default=1)
    where = f"{name}, {row['column'].split('/')[-1]}, update {row['update']}, {row['difference']:.1g}"
    return True, where + (f", chance p = {p:.2g}" if p <= ALPHA else "")


def by_shape(path, folder, args):
    """(seen, how) by check.py on 3 finished runs."""
    meta = json.loads((args.curves / path.stem / SHAPES[path.stem] / "runs.json").read_text())
    failed = run_seeds(path, SEEDS, meta["flags"], folder / "runs", stale="rerun")
    if failed:
        return True, f"stops: exit code {sorted(failed.values())[0]}"
    answer = check_runs([folder / "runs" / f"seed_{seed}" for seed in SEEDS], args.curves)
    worst = min(answer["rows"], key=lambda row: (row["p"], -abs(row["z"])))
    if worst["p"] > ALPHA:
        return False, f"p = {worst['p']:.2g}"
    first, last = answer["windows"][worst["window"]]
    values = f"{number(worst['here'])} against {number(worst['reference'])}"
    return True, f"{answer['verdict']}: {worst['column'].split('/')[-1]}, updates {first}-{last}, {values}"


def by_tests(path, folder, args):
    """(seen, how): the first unit test that fails with the script in `folder`, without its parameters."""
    names = [test.name for test in sorted((folder / "tests").glob("test_*.py"))]
    names = [name for name in FIRST if name in names] + [name for name in names if name not in FIRST]
    command = [sys.executable, "-m", "pytest", *PYTEST, *(f"tests/{name}" for name in names)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax-cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | cache, capture_output=True, text=True)
    (folder / "pytest.txt").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return False, ""
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if not found:
        raise NotComparable(f"pytest did not run, exit code {done.returncode}: see {folder}/pytest.txt")
    return True, re.sub(r"\[.*", "", found[1])


PARTS = {"start": by_start, "shape": by_shape, "tests": by_tests}


def key_of(part, path, folder, args):
    """What a cell depends on: the faulty script, and the tests or the reference."""
    if part == "tests":
        used = sorted((folder / "tests").glob("*.py"))
    elif part == "start":
        used = [found / "start.csv" for found in references(args.curves, "start", path.stem)]
    else:
        used = [args.curves / path.stem / SHAPES[path.stem] / "runs.csv"]
    return hashlib.sha256(b"".join(x.read_bytes() for x in [path, *used])).hexdigest()[:12]


def try_fault(fault, cells, args):
    """Fill the cells of one fault, {part: {seen, how, key}}, where they are not there or out of date."""
    folder = args.runs / args.script / fault.name
    folder.mkdir(parents=True, exist_ok=True)
    path = lay_out(fault, args.script, folder)
    for part in args.parts:
        seen_already = args.script != "ppo_cartpole" and cells.get("start", {}).get("seen")
        if part == "shape" and seen_already:
            cells.pop("shape", None)
            continue
        key = key_of(part, path, folder, args)
        if cells.get(part, {}).get("key") != key:
            seen, how = PARTS[part](path, folder, args)
            if fault.name == "none" and part == "tests" and seen:
                raise NotComparable(f"{how} fails without a fault: see {folder}/pytest.txt")
            cells[part] = {"seen": seen, "how": how, "key": key}
            print(f"{fault.name}, {part}: {'seen' if seen else 'not seen'} {how}", flush=True)
    return cells


def main(args=None):
    """Run a command line; returns 1 if a fault got through or the control was accused."""
    args = tyro.cli(Args, args=args, description=__doc__)
    faults = faults_of(args.script)
    try:
        known = [*SHAPES, *PARTS, *(fault.name for fault in faults)]
        if unknown := {args.script, *args.only, *args.parts} - set(known):
            raise NotComparable(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        source = (ROOT / f"{args.script}.py").read_text()
        for fault in faults:
            plant(fault, source)  # all of them match, or nothing is run
        results = json.loads(args.out.read_text()) if args.out.exists() else {}
        rows = results.setdefault(args.script, {})
        for fault in faults:
            if not args.only or fault.name in args.only:
                rows[fault.name] = {"what": fault.what} | try_fault(fault, rows.get(fault.name, {}), args)
                results[args.script] = {other.name: rows[other.name] for other in faults if other.name in rows}
                write_json(args.out, results)
    except NotComparable as error:
        return fail(error)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    seen = {name: any(row.get(part, {}).get("seen") for part in PARTS) for name, row in rows.items()}
    wrong = [name for name, found in seen.items() if found == (name == "none")]
    print(f"seen by nobody, or accused without a fault: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
