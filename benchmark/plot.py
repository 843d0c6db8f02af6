"""Draw the reference runs and write the tables of README.md, all from the files in this folder.

    python benchmark/plot.py              # figures/*.png and the tables
    python benchmark/plot.py --check      # exit code 1 if the tables in README.md are not what the files say

Nothing between the markers <!-- NAME:begin --> and <!-- NAME:end --> in README.md is typed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from check import ALPHA, BOUND, edges_of, p_values, table_of
from reference import CURVES, HERE, read_reference, references
from scipy.stats import bootstrap, trim_mean

SURFACE, INK, MUTED, GRID, BLUE = "#fcfcfb", "#0b0b0b", "#52514e", "#e4e3df", "#2a78d6"
PEER_LINES = (("#eb6834", (0, (5, 2))), ("#4a3aa7", (0, (1.5, 1.5))), (INK, (0, (5, 2, 1, 2))))  # color, dashes


@dataclass(frozen=True)
class Args:
    check: bool = False  # write nothing; tell whether the tables are up to date
    curves: Path = CURVES  # where the reference runs are
    out: Path = HERE  # where README.md, figures/ and the files of results are


def interquartile_mean(values, axis=0):
    """The mean of the middle half (Agarwal et al. 2021, arXiv 2108.13264): one lucky seed does not move it."""
    return trim_mean(values, 0.25, axis=axis)


def interval(values):
    """(low, high): its 95% bootstrap interval, the seeds, in the first axis, drawn with replacement."""
    if np.ptp(values) == 0:
        return values[0], values[0]
    how = dict(method="percentile", n_resamples=2000, vectorized=True, random_state=0)
    return bootstrap((values,), interquartile_mean, axis=0, **how).confidence_interval


def filled(values):
    """[R], gaps filled with the last value before them; those at the start with the first value there is."""
    known = np.flatnonzero(~np.isnan(values))
    last = known[np.maximum(np.searchsorted(known, np.arange(len(values)), side="right") - 1, 0)]
    return values[last]


def returns_of(run):
    return filled(run.columns["charts/episodic_return"])


# ------------------------------------------------------------------------------------------------ figures


def draw(title, runs, peers, path):
    """One figure: every seed, interquartile mean with its interval, the peers' published figures."""
    import matplotlib  # here, so that --check does without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    frames, curves = runs[0].columns["frames"], np.array([returns_of(run) for run in runs])
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": GRID})
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=150, facecolor=SURFACE, layout="constrained")
    axes.set_facecolor(SURFACE)
    axes.plot(frames, curves.T, color=BLUE, alpha=0.22, linewidth=0.9)
    if len(runs) >= 3:
        low, high = interval(curves)
        axes.fill_between(frames, low, high, color=BLUE, alpha=0.22, linewidth=0, label="95% bootstrap interval")
    name = f"interquartile mean of {len(runs)} seeds" if len(runs) > 1 else "its only seed"
    axes.plot(frames, interquartile_mean(curves), color=BLUE, linewidth=2.2, label=name)
    for peer, (color, style) in zip(peers, PEER_LINES):
        axes.axhline(peer["value"], color=color, linewidth=1.5, linestyle=style, label=peer["label"])
    axes.set_title(title, loc="left", color=INK, fontsize=13)
    axes.set_xlabel("frames (decisions of the agent)", color=MUTED)
    axes.set_ylabel("return of the training episodes", color=MUTED)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlim(0, frames[-1])
    # Below the axes, where no curve can be hidden.
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9.5, labelcolor=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without Matplotlib's version in the file, it is the same file again.
    figure.savefig(path, facecolor=SURFACE, metadata={"Software": None})
    plt.close(figure)


def figure_path(out, folder):
    return out / "figures" / f"{folder.parent.name}__{folder.name}.png"


# ------------------------------------------------------------------------------------------------- tables


def markdown(header, rows):
    """A table; the first column is flush left, all others flush right."""
    if not rows:
        return "(nothing yet)"
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def with_interval(values):
    """The interquartile mean of one number per seed, and its interval."""
    values = np.asarray(values, float)
    low, high = interval(values) if len(values) >= 3 else (None, None)
    return f"{interquartile_mean(values):.1f}" + (f" [{low:.1f}, {high:.1f}]" if len(values) >= 3 else "")


def false_alarms(runs):
    """What check.py says of these runs themselves: each one, and each with the next two, judged by all the others."""
    if len(runs) < 20:
        return "too few seeds"
    _, table = table_of(runs, edges_of(len(runs[0].columns["frames"])))
    found = [sum(p_values(np.roll(table, i, 0), m).min() <= ALPHA for i in range(len(runs))) for m in (1, 3)]
    return f"{found[0]} and {found[1]} of {len(runs)}"


def runs_table(curves, peers):
    rows = []
    for folder in references(curves):
        meta, runs = read_reference(folder)
        frames, env_id = runs[0].columns["frames"], meta["settings"]["env_id"]
        late = [returns_of(run)[frames > 0.9 * frames[-1]].mean() for run in runs]
        capped, episodes = (int(sum(run.result.get(f"eval_{x}", 0) for run in runs)) for x in ("capped", "episodes"))
        greedy = with_interval([run.result["eval_return_mean"] for run in runs])
        published = peers.get(env_id, [])
        published = [f"[{x['short']}]({x['source']})" if "://" in x["source"] else x["short"] for x in published]
        rows.append([
            f"`{meta['script']}.py` {folder.name}", f"{frames[-1]:,.0f}", len(runs), with_interval(late),
            greedy + (f", {capped} of {episodes} episodes cut" if capped else ""),
            f"{np.median([run.result['seconds'] for run in runs]):,.0f}", false_alarms(runs),
            "; ".join(published) or "-",
        ])  # fmt: skip
    header = ["what", "frames", "seeds", "return, last 10% of training", "greedy return", "seconds", "false alarms",
              "published"]  # fmt: skip
    return markdown(header, rows)


def rounding_table(folder):
    """The largest difference of each variation and script, by update, from the answers of check.py --start --json."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        answer = json.loads(path.read_text())
        largest = np.max([found["largest"] for found in answer["settings"].values()], axis=0)
        what = f"{path.stem.split('__')[-1]}, jax {answer['jax']}, {answer['cpu']}"
        rows.append([f"`{answer['original']}.py`, {what}", *(f"{x:.0e}" for x in largest)])
    return markdown(["script, played with", "update 1", "update 2", "update 3"], rows)


def faults_table(path):
    if not path.exists():
        return "(nothing yet)"
    texts = []
    for script, found in json.loads(path.read_text()).items():
        rows, parts = [], ("start", "shape", "tests")
        for name, row in found.items():
            cells = [row.get(part) for part in parts]
            rows.append([f"{name}: {row['what']}", *(words_of(cell) for cell in cells)])
        planted = [row for name, row in found.items() if name != "none"]
        counts = [count_of(planted, some) for some in (("start",), ("shape",), ("start", "shape"), ("tests",))]
        words = ("the start sees {}", "the shape {}", "one of these two {}", "the unit tests {}")
        summary = ", ".join(text.format(count) for text, count in zip(words, counts) if count) or "nothing was run"
        table = markdown(["planted fault", "start", "shape", "unit tests"], rows)
        texts.append(f"`{script}.py`, {len(planted)} faults: {summary}.\n\n{table}")
    return "\n\n".join(texts)


def count_of(rows, parts):
    """How many of the faults that any of these parts was tried on it saw, in words; None if there are none."""
    tried = [[row[part]["seen"] for part in parts if part in row] for row in rows]
    return f"{sum(map(any, tried))} of {sum(map(bool, tried))}" if any(tried) else None


def words_of(cell):
    """A cell of faults.json in words."""
    if not cell:
        return "not run"
    return ("yes" if cell["seen"] else "no") + (f": {cell['how']}" if cell["how"] else "")


def speed_tables(folder):
    texts = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if compared := content.get("compared"):
            first, *_ = compared["programs"].values()
            words = {"seconds": "seconds, whole process", "training": "frames/s, training", "peak_mib": "peak MiB",
                     "eval_return": "greedy return"}  # fmt: skip
            figures = [figure for figure in words if figure in first]
            rows = [[name, *(f"{row[x]:,.1f}" for x in figures)] for name, row in compared["programs"].items()]
            texts.append(f"{path.stem}, {compared['frames']:,} frames, {measured_on(compared)}:")
            texts.append(markdown(["program", *(words[figure] for figure in figures)], rows))
        if part := content.get("taken_apart"):
            total = sum(part["parts"].values())
            shares = ", ".join(f"{name} {x / total:.0%}" for name, x in part["parts"].items())
            texts.append(f"Of {total:.1f} s for {part['frames']:,} frames of `ppo_{path.stem}.py`: {shares}.")
    return "\n\n".join(texts) or "(nothing yet)"


def measured_on(content):
    """When and on what a figure was measured."""
    return f"{content['date']}, {content['machine']['cores']} cores of {content['machine']['cpu']}"


def make_readme(curves=CURVES, out=HERE):
    """What README.md should be now."""
    peers = json.loads((HERE / "peers.json").read_text())
    folders = references(curves)
    images = "\n\n".join(f"![{folder.name}](figures/{figure_path(out, folder).name})" for folder in folders)
    tables = {
        "runs": runs_table(curves, peers),
        "figures": images or "(nothing yet)",
        "faults": faults_table(out / "faults.json"),
        "rounding": f"The bound is {BOUND:g}.\n\n" + rounding_table(out / "rounding"),
        "speed": speed_tables(out / "speed"),
    }
    text = (out / "README.md").read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md needs {begin} and {end}, each once")
        text = text.split(begin)[0] + begin + "\n" + table + "\n" + end + text.split(end)[1]
    return text


def main(args=None):
    """Run a command line; returns the exit code."""
    args = tyro.cli(Args, args=args, description=__doc__)
    readme = args.out / "README.md"
    text = make_readme(args.curves, args.out)
    if args.check:
        same = text == readme.read_text()
        print("README.md is up to date" if same else "README.md is not what the files say: run benchmark/plot.py")
        return 0 if same else 1
    peers = json.loads((HERE / "peers.json").read_text())
    for folder in references(args.curves):
        meta, runs = read_reference(folder)
        title = f"{meta['script']}.py, {folder.name}"
        draw(title, runs, peers.get(meta["settings"]["env_id"], []), figure_path(args.out, folder))
        print(figure_path(args.out, folder))
    readme.write_text(text)
    print(readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
