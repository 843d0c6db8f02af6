"""Draw the reference curves and write the tables of README.md, all from the files in this folder.

    python benchmark/plot.py              # figures/*.png and the tables
    python benchmark/plot.py --check      # exit code 1 if the tables in README.md are not what the files say

Nothing between the markers <!-- NAME:begin --> and <!-- NAME:end --> in README.md is typed.
"""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from check import leave_one_out
from reference import (
    CURVES,
    HERE,
    NotComparable,
    bootstrap_interval,
    final_return,
    frames_to,
    interquartile_mean,
    read_reference,
    references,
    returns_of,
    scale_of,
)  # fmt: skip

SURFACE, INK, MUTED, GRID = "#fcfcfb", "#0b0b0b", "#52514e", "#e4e3df"
BLUE, ORANGE, VIOLET = "#2a78d6", "#eb6834", "#4a3aa7"
PEER_LINES = ((ORANGE, (0, (5, 2))), (VIOLET, (0, (1.5, 1.5))), (INK, (0, (5, 2, 1, 2))))  # color, dashes


@dataclass(frozen=True)
class Args:
    check: bool = False  # write nothing; tell whether the tables are up to date
    curves: Path = CURVES  # where the reference curves are
    out: Path = HERE  # where README.md, figures/, faults.csv and throughput.json are


# ------------------------------------------------------------------------------------------------ figures


def draw(meta, runs, peers, path):
    """One figure: every seed, interquartile mean with its interval, the peers' published figures."""
    import matplotlib  # here, so that --check does without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    frames, curves = runs[0].frames, np.array([returns_of(run) for run in runs])
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": GRID})
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=150, facecolor=SURFACE, layout="constrained")
    axes.set_facecolor(SURFACE)
    for i, curve in enumerate(curves):
        label = "one seed" if i == 0 and len(runs) > 1 else ""
        axes.plot(frames, curve, color=BLUE, alpha=0.22, linewidth=0.9, label=label)
    if len(runs) >= 3:
        low, high = bootstrap_interval([curves])
        what = "95% bootstrap interval over seeds"
        axes.fill_between(frames, low, high, color=BLUE, alpha=0.22, linewidth=0, label=what)
    name = f"interquartile mean of {len(runs)} seeds" if len(runs) > 1 else "its only seed"
    axes.plot(frames, interquartile_mean(curves), color=BLUE, linewidth=2.2, label=name)
    for peer, (color, style) in zip(peers, PEER_LINES[: len(peers)], strict=True):
        axes.axhline(peer["value"], color=color, linewidth=1.5, linestyle=style, label=peer["label"])
    title = f"{meta['script']}.py on {meta['env_id']}{label_of(meta)}"
    axes.set_title(title, loc="left", color=INK, fontsize=13)
    axes.set_xlabel("frames (decisions of the agent)", color=MUTED)
    axes.set_ylabel("return of the training episodes", color=MUTED)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlim(0, frames[-1])
    shown = [curves.min(), curves.max(), *(peer["value"] for peer in peers), 0]
    low, high = min(shown), max(shown)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.06 * (high - low))
    # Below the axes, where no curve can be hidden.
    legend = figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9.5, labelcolor=MUTED)
    for handle in legend.get_lines():
        handle.set_alpha(max(handle.get_alpha() or 1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without Matplotlib's version in the file, it is the same file again.
    figure.savefig(path, facecolor=SURFACE, metadata={"Software": None})
    plt.close(figure)


def label_of(meta):
    return f", {meta['label']}" if meta["label"] else ""


def figure_path(out, folder):
    return out / "figures" / f"{folder.parent.name}__{folder.name}.png"


# ------------------------------------------------------------------------------------------------- tables


def markdown(header, rows):
    """A table; the first column is flush left, all others flush right."""
    if not rows:
        return "(nothing yet)"
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def with_interval(values, spec=".1f"):
    """The interquartile mean of one number per seed, and its interval."""
    mean = interquartile_mean(values)
    if len(values) < 3:
        return f"{mean:{spec}}"
    low, high = bootstrap_interval([np.asarray(values)])
    return f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def greedy_return(runs):
    """The greedy evaluation of all seeds, and how many of its episodes were cut before their end."""
    text = with_interval([run.result["eval_return_mean"] for run in runs])
    capped, episodes = (
        int(sum(run.result.get(f"eval_{what}", 0) for run in runs)) for what in ("capped", "episodes")
    )
    return text + (f", {capped} of {episodes} episodes cut" if capped else "")


def false_alarms(runs):
    """What leave-one-out says of check.py on this reference."""
    try:
        return f"{leave_one_out(runs).count('regression')} of {len(runs)}"
    except NotComparable:
        return "too few seeds"


def linked(peer):
    """A published figure with a link to where it stands, if that has an address."""
    return f"[{peer['short']}]({peer['source']})" if peer["source"].startswith("http") else peer["short"]


def curves_table(curves, peers):
    rows = []
    for folder in references(curves):
        meta, runs = read_reference(folder)
        scale = scale_of(runs)
        reached = [frames_to(run, scale.threshold) for run in runs]
        never = sum(x > run.frames[-1] for x, run in zip(reached, runs))
        reached = f"{scale.threshold:.0f} at {np.median(reached):,.0f}" + (f", {never} never" if never else "")
        published = "; ".join(linked(peer) for peer in peers.get(meta["env_id"], []))
        rows.append([
            f"`{meta['script']}.py` {meta['env_id']}{label_of(meta)}", f"{runs[0].frames[-1]:,}", len(runs),
            with_interval([final_return(run) for run in runs]),
            greedy_return(runs), reached, f"{np.median([entry['seconds'] for entry in meta['seeds'].values()]):,.0f}",
            false_alarms(runs), published or "-",
        ])  # fmt: skip
    header = ["what", "frames", "seeds", "return, last 10% of training", "greedy return", "threshold reached",
              "seconds", "false alarms", "published"]  # fmt: skip
    return markdown(header, rows)


def faults_table(path):
    if not path.exists():
        return "(nothing yet)"
    with open(path, newline="") as file:
        faults = list(csv.DictReader(file))
    rows = []
    for fault in faults:
        test = fault["unit_test"]
        rows.append([f"{fault['fault']}: {fault['what']}", fault["curves"], f"`{test}`" if test else "no"])
    planted = [fault for fault in faults if fault["fault"] != "none"]
    by_curves = sum(fault["curves"].startswith("yes") for fault in planted)
    by_tests = sum(bool(fault["unit_test"]) for fault in planted)
    both = sum(bool(f["unit_test"]) or f["curves"].startswith("yes") for f in planted)
    summary = f"Of {len(planted)} planted faults the curves catch {by_curves}, the unit tests {by_tests}, "
    summary += f"both together {both}."
    return (
        markdown(["planted fault", "caught by the curves (3 seeds)", "first unit test that fails"], rows)
        + "\n\n"
        + summary
    )


def throughput_tables(path):
    if not path.exists():
        return "(nothing yet)"
    content = json.loads(path.read_text())
    rows = []
    for name, row in content["programs"].items():
        rows.append([
            name, f"{row['seconds']:.1f}", f"{row['frames_per_second']:,.0f}", f"{row['ratio']:.2f}",
            f"{row['peak_mib']:,.0f}", f"{row['eval_return']:.1f}",
        ])  # fmt: skip
    header = ["program", "seconds, whole process", "frames/s, whole process", "times as long as the first",
              "peak MiB", "greedy return"]  # fmt: skip
    text = f"{content['frames']:,} frames of {content['env_id']}, medians of {content['repeats']} alternating "
    text += f"runs, {measured_on(content)}.\n\n" + markdown(header, rows)
    for script, parts in content.get("breakdown", {}).items():
        total, frames = sum(parts["seconds"].values()), parts["frames"]
        rows = [[part, f"{x:.2f}", f"{100 * x / total:.0f}%"] for part, x in parts["seconds"].items()]
        text += f"\n\nWhere `{script}.py` spends its time, {frames:,} frames, {measured_on(parts)}:\n\n"
        text += markdown(["part", "seconds", "share"], rows)
    return text


def pixels_table(out):
    """Speed on pixels, ours and the peers', from *_speed.json."""
    rows = []
    for path in sorted(out.glob("*_speed.json")):
        content = json.loads(path.read_text())
        for who, name in (("ours", "ours"), ("stock", "Stable-Baselines3"), ("sbx", "SBX")):
            if who not in content:
                continue
            found = {what: np.median(figures) for what, figures in content[who].items()}
            ratio = found["training"] / np.median(content["stock"]["training"]) if "stock" in content else np.nan
            rows.append([
                f"{path.stem.removesuffix('_speed')}, {name}", f"{found['training']:,.0f}", f"{ratio:.2f}",
                f"{found['environment']:,.0f}", f"{found['seconds']:.0f} for {found['frames']:,.0f} frames",
                f"{found['peak_mib']:,.0f}", measured_on(content),
            ])  # fmt: skip
    header = ["game", "frames/s, training", "times Stable-Baselines3", "frames/s, environments alone",
              "seconds, whole process", "peak MiB", "measured"]  # fmt: skip
    return markdown(header, rows)


def measured_on(content):
    """When and on what a figure was measured."""
    return f"{content['date']}, {content['machine']['cores']} cores of {content['machine']['cpu']}"


def filled_in(text, tables):
    """`text` with the tables, {name: Markdown}, between their markers."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md needs {begin} and {end}, each once")
        head, rest = text.split(begin)
        text = head + begin + "\n" + table + "\n" + end + rest.split(end)[1]
    return text


def make_readme(curves=CURVES, out=HERE):
    """What README.md should be now."""
    peers = json.loads((HERE / "peers.json").read_text())
    folders = references(curves)
    images = "\n\n".join(f"![{folder.name}](figures/{figure_path(out, folder).name})" for folder in folders)
    tables = {
        "table": curves_table(curves, peers),
        "figures": images or "(nothing yet)",
        "faults": faults_table(out / "faults.csv"),
        "throughput": throughput_tables(out / "throughput.json"),
        "pixels": pixels_table(out),
    }
    return filled_in((out / "README.md").read_text(), tables)


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
        draw(meta, runs, peers.get(meta["env_id"], []), figure_path(args.out, folder))
        print(figure_path(args.out, folder))
    readme.write_text(text)
    print(readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
