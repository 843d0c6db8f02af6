"""Does it still learn as it should? Compares finished runs with the reference curves of the same settings.

    python ppo_cartpole.py --seed 101 --run-dir runs/mine      # about 8 seconds
    python benchmark/check.py runs/mine                         # one run: is it what one run should be?
    python benchmark/check.py runs/a runs/b runs/c              # several: a two-sample test, which sees more
    python benchmark/check.py runs/mine --json                  # for machines

Exit code 0: consistent, or better. 1: a regression. 2: not comparable (other settings, another budget,
another version of the environment, an unfinished run, no reference), and nothing is concluded.

A sound script is called a regression in at most 5% of the checks, over all four statistics together.
README.md in this folder says what they are and how they are tested.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from reference import (
    ALPHA,
    CURVES,
    NotComparable,
    differences,
    permutation_test,
    prediction_bound,
    read_reference,
    read_run,
    references,
    require_enough,
    scale_of,
    statistics,
)

LOWER_IS_BETTER = ("frames to threshold",)
ENVIRONMENT_PACKAGES = ("gymnasium", "ale-py", "flappy-bird-gymnasium")  # another version may be another task


@dataclass(frozen=True)
class Args:
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # finished runs, all with the same settings
    json: bool = False  # print JSON instead of words
    across_versions: bool = False  # compare though a package of the environment has another version
    curves: Path = CURVES  # where the reference curves are


def minor(version):
    return version.split(".")[:2]


def find_reference(run, curves):
    """The folder with the curves of this run's settings. Raises NotComparable, and says what differs."""
    candidates = []
    for folder in references(curves):
        meta = json.loads((folder / "meta.json").read_text())
        if meta["env_id"] == run.settings.get("env_id"):
            candidates.append((differences(run.settings, meta["settings"]), folder))
    if not candidates:
        raise NotComparable(f"there are no reference curves of {run.settings.get('env_id')} in {curves}")
    found, folder = min(candidates, key=lambda pair: len(pair[0]))
    if found:
        raise NotComparable(f"{run.name} has other settings than its reference ({'; '.join(found)})")
    return folder


def notes_on(run, meta, across_versions):
    """What to know about a comparison that is allowed. Raises NotComparable where a version forbids it."""
    notes = []
    for name, version in run.versions.items():
        expected = meta["versions"].get(name)
        if expected is None or version == expected:
            continue
        if name in ENVIRONMENT_PACKAGES and minor(version) != minor(expected) and not across_versions:
            what = f"{name} {version} may be another task than {expected}, which the reference was played with"
            raise NotComparable(f"{what}; --across-versions compares all the same")
        notes.append(f"{name} {version}; the reference had {expected}")
    for here, there, what in (
        (run.settings, meta["settings"], "new"),
        (meta["settings"], run.settings, "gone"),
    ):
        notes += [f"the setting {name} is {what}" for name in here if name not in there]
    return notes


def judge(runs, reference, details=True):
    """Compare runs with reference runs of the same task. Returns a dict, see `report`.

    details: whether to work out the bounds, which takes longest.
    """
    require_enough(len(reference), len(runs))
    scale = scale_of(reference)
    table = [statistics(run, scale) for run in reference]
    new_table = [statistics(run, scale) for run in runs]
    names = list(table[0])
    sign = np.array([-1.0 if name in LOWER_IS_BETTER else 1.0 for name in names])
    old, new = (np.array([list(row.values()) for row in rows]) * sign for rows in (table, new_table))
    # 1% of what there is to learn, or of the budget: less than that is no difference.
    floor = np.where(sign < 0, 0.01 * reference[0].frames[-1], max(0.01 * abs(scale.end - scale.start), 1e-9))
    p_worse, p_better = permutation_test(old, new, floor), permutation_test(-old, -new, floor)
    rows = []
    for i, name in enumerate(names):
        row = {"runs": sign[i] * new[:, i].mean(), "reference": sign[i] * old[:, i].mean()}
        if details:
            bounds = (
                prediction_bound(old, len(new), floor, i),
                -prediction_bound(-old, len(new), floor, i),
            )
            row["expected"] = sorted(sign[i] * bound for bound in bounds)
        row |= {"p_worse": float(p_worse[i]), "p_better": float(p_better[i])}
        rows.append({"statistic": name} | row)
    # A run that is worse in one thing and better in another has changed, and is for a person to look at.
    verdict = "regression" if p_worse.min() <= ALPHA else "better" if p_better.min() <= ALPHA else "consistent"
    counts = {"runs": len(new), "reference_runs": len(old), "threshold": scale.threshold}
    test = "ranks of the worst statistic, exact" if len(new) == 1 else "two-sample permutation test, max-T"
    return {"verdict": verdict, "test": test, **counts, "statistics": rows}


def leave_one_out(reference):
    """The verdict on each reference run by all the others."""
    others = [reference[:i] + reference[i + 1 :] for i in range(len(reference))]
    return [judge([run], rest, details=False)["verdict"] for run, rest in zip(reference, others)]


def number(x):
    return f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"


def sentence(answer):
    """The verdict in words."""
    key = {"regression": "p_worse", "better": "p_better", "consistent": "p_worse"}[answer["verdict"]]
    rows = sorted(answer["statistics"], key=lambda row: row[key])
    best = rows[0]
    if answer["verdict"] == "consistent":
        return f"CONSISTENT with the reference: chance explains what differs (p = {best[key]:.2f} at the least)."
    found = [row for row in rows if row[key] <= ALPHA]
    what = ", ".join(f"{row['statistic']} {number(row['runs'])} against {number(row['reference'])}" for row in found)
    how = f"confidence {1 - best[key]:.1%}, p = {best[key]:.2g}"
    return f"{'REGRESSION' if answer['verdict'] == 'regression' else 'BETTER'}: {what} ({how})."


def report(answer):
    """The whole answer in words: a table and a sentence."""
    runs = "1 run" if answer["runs"] == 1 else f"{answer['runs']} runs"
    lines = [f"{answer['script']} on {answer['env_id']}: {runs} against {answer['reference_runs']} reference runs"]
    lines += [f"note: {note}" for note in answer["notes"]]
    lines += [
        "",
        f"{'statistic':<24}{'here':>10}{'reference':>11}{'expected':>22}{'p worse':>9}{'p better':>10}",
    ]
    for row in answer["statistics"]:
        threshold = f" {number(answer['threshold'])}" if row["statistic"] == "frames to threshold" else ""
        name = row["statistic"].replace(" threshold", threshold)
        expected = " to ".join(map(number, row["expected"]))
        cells = f"{number(row['runs']):>10}{number(row['reference']):>11}{expected:>22}"
        lines.append(f"{name:<24}{cells}{row['p_worse']:>9.2g}{row['p_better']:>10.2g}")
    lines += [
        "",
        f"by: {answer['test']}; a false REGRESSION in at most {ALPHA:.0%} of the checks",
        sentence(answer),
    ]
    return "\n".join(lines)


def check(run_dirs, curves=CURVES, across_versions=False):
    """The answer on finished runs, a dict for `report`. Raises NotComparable."""
    runs = [read_run(path) for path in run_dirs]
    if not runs:
        raise NotComparable("name at least one run directory")
    own = [run.seed for run in runs]
    if len(set(own)) < len(own):
        raise NotComparable(f"these runs have the seeds {own}: two of one seed would be one run counted twice")
    for run in runs[1:]:
        found = differences(run.settings, runs[0].settings)
        if found:
            raise NotComparable(f"{run.name} and {runs[0].name} have different settings ({'; '.join(found)})")
    folder = find_reference(runs[0], curves)
    meta, reference = read_reference(folder)
    notes = [note for run in runs for note in notes_on(run, meta, across_versions)]
    for run in runs:
        if run.frames[-1] != reference[0].frames[-1]:
            raise NotComparable(f"{run.name} has {run.frames[-1]:,} frames, not {reference[0].frames[-1]:,}")
    # With no change at all they would be the same runs, and not two draws of one kind.
    shared = [run.seed for run in reference if run.seed in own]
    reference = [run for run in reference if run.seed not in own]
    if shared:
        notes.append(f"the reference's own runs of seeds {', '.join(map(str, shared))} are left out")
    about = {"script": meta["script"], "env_id": meta["env_id"], "label": meta["label"]}
    return about | {"notes": list(dict.fromkeys(notes))} | judge(runs, reference)


def main(args=None):
    """Run a command line; returns the exit code."""
    args = tyro.cli(Args, args=args, description=__doc__)
    try:
        answer = check(args.run_dirs, args.curves, args.across_versions)
    except NotComparable as error:
        answer = {"verdict": "not comparable", "reason": str(error)}
        print(json.dumps(answer, indent=2) if args.json else f"NOT COMPARABLE: {error}")
        return 2
    print(json.dumps(answer, indent=2) if args.json else report(answer))
    return 1 if answer["verdict"] == "regression" else 0


if __name__ == "__main__":
    sys.exit(main())
