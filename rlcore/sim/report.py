"""Write the results of a simulated run: a table, a picture of the engines over time, a trace."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.metrics import trace as traces
from rlcore.metrics.plots import COLORS
from rlcore.sim.cluster import PHASES, SimStep, Summary
from rlcore.sim.mux_group import MuxTimeline

COLOURS = {
    "all": "#3B6FA0",
    "short": "#2A9D8F",
    "long": "#B279A2",
    "reward": "#EECA3B",
    "old_log_prob": "#9ECAE9",
    "update_actor": "#F58518",
    "update_weights": "#54A24B",
    "resize_engines": "#E45756",
    "stream": "#FFBF79",
}
SAYS = {
    "all": "decoding",
    "short": "decoding, short round",
    "long": "decoding, long round",
    "stream": "stream: training while other engines decode",
}
IN_ORDER = ("resize_engines", *PHASES[:-1])
"""Phases of a step in order; a step begins by resizing the engines if necessary."""
MOST_ROWS = 64
"""Maximum number of engines in a picture. If there are more, every n-th engine is shown."""


def table(arms: Mapping[str, Summary]) -> list[str]:
    """Return a table of the mean seconds of a step by phase, with one line per compared run.
    Speed-ups are relative to the first run."""
    used = [p for p in PHASES if any(a.phases[p] >= 0.005 for a in arms.values())]
    width = max(12, *(len(name) + 2 for name in arms))
    head = f"{'seconds a step':{width}}" + "".join(f"{p:>{_wide(p)}}" for p in used)
    head += f"{'step':>10}{'speed-up':>10}{'idle':>8}{'trained':>9}{'long':>7}{'preempt':>9}"
    lines = [head + f"{'early':>8}"]
    first = next(iter(arms.values()))
    for name, a in arms.items():
        cells = "".join(f"{a.phases[p]:{_wide(p)}.2f}" for p in used)
        lines.append(
            f"{name:{width}}{cells}{a.seconds:10.2f}{first.seconds / a.seconds:9.2f}x"
            f"{a.idle:8.0%}{a.trained_share:9.0%}{a.long_share:7.0%}{a.preemptions:9.1f}"
            f"{a.streamed:8.0%}"
        )
    return [
        *lines,
        "",
        "idle: share of engine time in a rollout without a request; trained: share of decoded",
        "tokens that are trained; long: share of long rounds; preempt: requests preempted per",
        "step by a full cache; early: share of groups trained while others are decoded",
    ]


def _wide(phase: str) -> int:
    return max(10, len(phase) + 2)


def gantt(arms: Mapping[str, Sequence[SimStep]], path: Path, title: str) -> None:
    """Write a PNG of the engines' activity over time, with one panel per compared run on a common
    time axis and one row per engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [min(MOST_ROWS, len(steps[0].outcome.spans)) for steps in arms.values()]
    figure, panels = pyplot.subplots(
        len(arms),
        1,
        figsize=(12, 1.7 + sum(1.1 + 0.045 * max(n, 8) for n in rows)),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [max(n, 8) for n in rows]},
        layout="constrained",
    )
    end = max(_end(steps) for steps in arms.values())
    seen: dict[str, None] = {}
    for axes, (name, steps), shown in zip(panels[:, 0], arms.items(), rows, strict=True):
        _panel(axes, steps, shown, seen)
        mean = _end(steps) / len(steps)
        axes.set_title(f"{name}: {mean:.0f} s a step", loc="left", fontsize=10)
        axes.set_ylabel("engine", fontsize=9)
        axes.set_xlim(0, end * 1.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel("seconds", fontsize=9)
    order = [what for what in COLOURS if what in seen]
    handles = [Patch(color=COLOURS[what], label=SAYS.get(what, what)) for what in order]
    handles.append(Patch(facecolor="#EEEEEE", label="idle"))
    handles.append(Patch(facecolor="white", label="(paler: fewer requests in the batch)"))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncol=min(len(handles), 5),
        fontsize=8,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def bars(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG that compares published and simulated values, with two bars per table cell. Bars
    of cells to which a constant was fitted are hatched."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [r for r in rows if r["published"] is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.3 * len(rows)), layout="constrained")
    for at, r in enumerate(rows):
        hatch = "///" if r["kind"] == "fitted" else None
        told = r["published"] or 0.0
        axes.barh(at - 0.19, told, 0.36, color="#B0B7BF")
        axes.barh(at + 0.19, r["simulated"], 0.36, color="#3B6FA0", hatch=hatch, edgecolor="white")
        most = max(told, r["simulated"])
        text = f"  {r['error']:+.3g}" if r["published"] is not None else ""
        axes.text(most, at, text, va="center", fontsize=7, color="#555555")
    axes.set_yticks(range(len(rows)), [str(r["cell"]) for r in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    handles = [
        Patch(color="#B0B7BF", label="published"),
        Patch(color="#3B6FA0", label="simulated, with difference"),
        Patch(
            facecolor="#3B6FA0",
            hatch="///",
            edgecolor="white",
            label="simulated, a constant is fitted to it",
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def ladder(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG of the ladder: a panel per size, with a bar per rung and per best composition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in rows if r.get("part") in ("rung", "best")]
    sizes = list(dict.fromkeys(r["size"] for r in shown))
    figure, panels = pyplot.subplots(
        len(sizes), 1, figsize=(9, 0.6 + 2.6 * len(sizes)), layout="constrained", squeeze=False
    )
    for axes, size in zip(panels[:, 0], sizes, strict=True):
        own = [r for r in shown if r["size"] == size]
        for at, r in enumerate(own):
            is_async = str(r["arm"]).startswith("async")
            colour = "#F58518" if is_async else "#3B6FA0"
            hatch = "///" if r["part"] == "best" else None
            axes.barh(at, r["simulated"], 0.7, color=colour, hatch=hatch, edgecolor="white")
            text = f"  {r['simulated']:.2f}x, {r['seconds']:g} s"
            axes.text(r["simulated"], at, text, va="center", fontsize=7, color="#555555")
        names = [
            f"best {r['kind_of_best']}: {r['arm']}" if r["part"] == "best" else str(r["arm"])
            for r in own
        ]
        axes.set_yticks(range(len(own)), names, fontsize=7)
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.axvline(1, color="#B0B7BF", linewidth=0.8)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{size} GPUs", loc="left", fontsize=9)
    figure.suptitle(f"{title}. Blue: on-policy; orange: asynchronous", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def flash(tables: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of the given ROLL Flash tables. `staleness`, `scaling` and `splits` have one
    panel each; `queue`, `replication` and `agentic` share a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = {
        "staleness": ("alpha", "speed-up over Sync-Naive"),
        "scaling": ("GPUs", "speed-up over Sync-Naive, alpha 2"),
        "splits": ("GPUs of 40 that train", "samples/s, alpha 2"),
    }
    bars_of = [n for n in ("queue", "replication", "agentic") if n in tables]
    names = [n for n in lines if n in tables] + (["bars"] if bars_of else [])
    widths = [4.0 if n == "bars" else 3.0 for n in names]
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(1.5 * sum(widths), 4.2), width_ratios=widths, layout="constrained"
    )
    for name, axes in zip(names, np.atleast_1d(panels), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if name == "bars":
            _bars(axes, [row for n in bars_of for row in tables[n]["rows"]])
            continue
        rows = [r for r in tables[name]["rows"] if "at" in r]
        at = sorted({r["at"] for r in rows})
        for law, color in zip(dict.fromkeys(r["law"] for r in rows), COLORS, strict=False):
            own = [r for r in rows if r["law"] == law]
            points = [r["at"] for r in own], [r["simulated"] for r in own]
            axes.plot(*points, color=color, marker="o", markersize=4, label=law)
            told = [(r["at"], r["published"]) for r in own if r["published"]]
            if told:
                axes.plot(*zip(*told, strict=True), "D", color=color, fillstyle="none")
        axes.legend(frameon=False, fontsize=8, title="diamonds: published", title_fontsize=7)
        x_label, y_label = lines[name]
        axes.set_xlabel(x_label, fontsize=8)
        axes.set_title(y_label, loc="left", fontsize=9)
        axes.set_xticks(at)
        axes.set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw bars of published and simulated ratios; cells with a fitted constant are hatched."""
    rows = [r for r in rows if r["published"] is not None and r["published"] < 20]
    for at, r in enumerate(rows):
        hatch = "///" if r["kind"] == "fitted" else None
        axes.barh(at - 0.19, r["published"], 0.36, color="#B0B7BF")
        axes.barh(at + 0.19, r["simulated"], 0.36, color="#3B6FA0", hatch=hatch, edgecolor="white")
    axes.set_yticks(range(len(rows)), [str(r["cell"]) for r in rows], fontsize=6)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title("published (grey), simulated (hatched: fitted)", loc="left", fontsize=9)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    title: str,
    axes_of: tuple[str, str],
    *,
    is_log: bool = False,
    is_step: bool = False,
) -> None:
    """Write a PNG with a curve for each of `lines`. With `is_step`, curves are step functions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, points in lines.items():
        x, y = zip(*points, strict=True)
        if is_step:
            axes.step(x, y, where="post", label=name, linewidth=1.1)
        else:
            axes.plot(x, y, marker="o", markersize=3.5, label=name, linewidth=1.4)
    if is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(axes_of[0], fontsize=9)
    axes.set_ylabel(axes_of[1], fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def timeline(
    happened: Mapping[str, MuxTimeline], path: Path, title: str, iterations: float = 5
) -> None:
    """Write a PNG that shows which job holds each node over the first `iterations` iterations, with
    one panel per group of jobs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, panels = pyplot.subplots(
        len(happened), 1, figsize=(12, 1 + 1.7 * len(happened)), squeeze=False, layout="constrained"
    )
    palette = ("#3B6FA0", "#F58518", "#54A24B", "#B279A2")
    for axes, (name, trace) in zip(panels[:, 0], happened.items(), strict=True):
        end = min(e[-1] / len(e) for e in trace.ends.values()) * iterations
        slots = sorted({s.slot for s in trace.spans}, key=lambda s: (s[0] != "r", s))
        tops = {slot: (float(n), 1.0) for n, slot in enumerate(slots)}
        colours = dict(zip(trace.ends, palette, strict=False))
        shown = [s for s in trace.spans if s.start < end]
        for slot in slots:
            mine = [s for s in shown if s.slot == slot]
            bars_of = [(s.start, min(s.end, end) - s.start) for s in mine]
            axes.broken_barh(bars_of, tops[slot], color=[colours[s.job] for s in mine])
        say = {"r": "rollout", "t": "train"}
        names = [f"{say[slot[0]]} {slot[1:]}" for slot in slots]
        axes.set_yticks([n + 0.5 for n in range(len(slots))], names, fontsize=8)
        for n in range(1, len(slots)):
            axes.axhline(n, color="white", linewidth=1.2)
        axes.set_ylim(len(slots), 0)
        axes.set_xlim(0, end)
        axes.set_facecolor("#EEEEEE")
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        handles = [Patch(color=c, label=f"job {job}") for job, c in colours.items()]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8,
                    frameon=False)  # fmt: skip
    panels[-1, 0].set_xlabel("seconds (grey: idle)", fontsize=9)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _end(steps: Sequence[SimStep]) -> float:
    return steps[-1].start + steps[-1].seconds


def _panel(axes: Any, steps: Sequence[SimStep], shown: int, seen: dict[str, None]) -> None:
    height = 1.0 if shown > 16 else 0.86
    for step in steps:
        engines = len(step.outcome.spans)
        rank_of = [i * engines // shown for i in range(shown)]
        at = step.start
        for phase in IN_ORDER:
            took = step.phases[phase]
            if took <= 0:
                continue
            if phase == "gen":
                axes.broken_barh([(at, took)], (-0.5, shown), color="#EEEEEE", linewidth=0)
                seen[step.kind] = None
                if any(step.outcome.stream_spans):
                    seen["stream"] = None
                most = max(span.running for spans in step.outcome.spans for span in spans)
                for row, rank in enumerate(rank_of):
                    spans = step.outcome.spans[rank]
                    axes.broken_barh(
                        [(at + s.start, s.end - s.start) for s in spans],
                        (row - height / 2, height),
                        color=[(COLOURS[step.kind], _strength(s.running, most)) for s in spans],
                        linewidth=0,
                    )
                    early = step.outcome.stream_spans[rank]
                    axes.broken_barh(
                        [(at + s.start, min(s.end, took) - s.start) for s in early],
                        (row - height / 2, height),
                        color=COLOURS["stream"],
                        linewidth=0,
                    )
            else:
                seen[phase] = None
                axes.broken_barh([(at, took)], (-0.5, shown), color=COLOURS[phase], linewidth=0)
            at += took
        axes.axvline(step.start, color="white", linewidth=1.2)
    axes.set_ylim(shown - 0.5, -0.5)
    axes.set_yticks([0, shown - 1], ["0", str(len(steps[0].outcome.spans) - 1)])


def _strength(running: int, most: int) -> float:
    """Return the opacity for a batch size: 1 for the largest batch, 1/4 for one request."""
    return 0.25 + 0.75 * math.log2(max(running, 1)) / max(math.log2(max(most, 1)), 1.0)


def trace(arms: Mapping[str, Sequence[SimStep]], path: Path) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing, with one process per compared run, one
    thread per engine, and one thread for the phases of the steps."""
    events: list[traces.Event] = []
    for pid, (name, steps) in enumerate(arms.items()):
        engines = max(len(s.outcome.spans) for s in steps)
        events += [traces.process(pid, name), traces.row(pid, 0, "step")]
        events += [traces.row(pid, r + 1, f"engine {r}") for r in range(engines)]
        for step in steps:
            events += _events(step, pid)
    traces.save(path, events)


def _events(step: SimStep, pid: int) -> list[traces.Event]:
    def bar(name: str, tid: int, start: float, seconds: float, **facts: object) -> traces.Event:
        return traces.bar(pid, tid, name, start, seconds, step=step.number, **facts)

    outcome = step.outcome
    out, at = [], step.start
    for phase in IN_ORDER:
        took = step.phases[phase]
        if took <= 0:
            continue
        if phase == "gen":
            facts = {
                "kind": step.kind,
                "tp": step.tp,
                "kept groups": len(outcome.kept),
                "tokens trained": sum(outcome.lengths),
                "tokens decoded": outcome.decoded,
                "preemptions": outcome.preemptions,
            }
            out.append(bar(f"rollout ({step.kind})", 0, at, took, **facts))
            for rank, spans in enumerate(outcome.spans):
                out += [
                    bar(
                        f"decode ({step.kind})",
                        rank + 1,
                        at + s.start,
                        s.end - s.start,
                        running=s.running,
                    )
                    for s in spans
                ]
            for rank, spans in enumerate(outcome.stream_spans):
                out += [
                    bar(
                        "update",
                        rank + 1,
                        at + s.start,
                        min(s.end, took) - s.start,
                        groups=s.running,
                    )
                    for s in spans
                    if s.start < took
                ]
        else:
            out.append(bar(phase, 0, at, took))
        at += took
    return out
