"""How training went: the error of every replacement against the tokens seen."""

from collections.abc import Sequence

from mxd.common.numbers import plural
from mxd.metrics.faithful import NMSE
from mxd.report.parts import Figure, Part, Section, slots
from mxd.report.run import Run
from mxd.report.svg import Axis, Line, Point, lines

POINTS = 100
"""Points of a curve, approximately: metrics.jsonl is thinned evenly, and the last point is always kept."""


def section(run: Run) -> Section | None:
    """Return the training curves; ``None`` where there are no metrics."""
    series: dict[str, list[Point]] = {}
    for number, row in enumerate(run.metrics, 1):
        point = Point(float(row["tokens"]), float(row[NMSE.key]), source=f"metrics.jsonl line {number}")
        series.setdefault(row["replacement"], []).append(point)
    known = [(run.replacement(name), thinned(points)) for name, points in series.items()]
    if not known:
        return None
    keys = slots([replacement.line for replacement, _ in known])
    facets = sorted({(r.layer or 0, r.k or 0, r.budget, r.where) for r, _ in known})
    end = max(points[-1].x for _, points in known)
    panels = []
    for facet in facets:
        here = [(r, p) for r, p in known if (r.layer or 0, r.k or 0, r.budget, r.where) == facet]
        drawn = [Line(keys[replacement.line], points, marks=False) for replacement, points in here]
        axes = Axis("tokens trained on", low=0.0, high=end), Axis(NMSE.label, "log")
        panels.append(lines(", ".join(filter(None, facet[2:])), *axes, drawn))
    title = (
        f"The {NMSE.label} of the training batches; lower is better. Each point is the mean since the one before it "
        "in metrics.jsonl. After figure 22 of the MxD paper, which sets fixed K beside random K."
    )
    parts: list[Part] = [Figure(title, panels, list(keys.values()))]
    how = "trained side by side" if len(known) > 1 else "trained"
    lead = f"{plural(len(known), 'replacement')}, {how} on one stream of activations: {end:,.0f} tokens."
    return Section("training", "Training", lead, parts)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return about ``POINTS`` of the points, evenly spaced, the last among them."""
    step = max(1, len(points) // POINTS)
    return list(points[(len(points) - 1) % step :: step])
