"""`python docs/speedups.py`: draws docs/speedups.svg from the table of docs/results.md.

Ink is the page's own colour where the picture is part of a page, and follows the reader's theme elsewhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

_FOLDER = Path(__file__).parent
_JIT, _DATA, _XLA = "plain `jax.jit`", "plain data parallelism", "XLA's own sharding of the rows"
#: Rows of the table that are drawn, each with the words of the picture.
_DRAWN = {
    ("table of 800,000 x 256, 640 Zipf ids, clip and Adagrad", _JIT): "table of 800,000 rows, Adagrad; against jax.jit",
    ("table of 800,000 x 256, 640 Zipf ids, clip and Adagrad", "the best step written by hand"): (
        "the same; against the best step written by hand"
    ),
    ("the first step with AdamW, decay and a schedule, 4% of the rows touched", _JIT): (
        "AdamW with decay and a schedule; against jax.jit"
    ),
    ("the demo's language model, `--devices 1`", _JIT): "language model; against jax.jit",
    ("the first step on 4 CPU devices (of 2 cores)", _DATA): "the table on 4 CPU devices; against data parallelism",
    ("the first step on 4 CPU devices (of 2 cores)", _XLA): "the same; against XLA's sharding of the rows",
    ("the demo on 4 CPU devices", _DATA): "language model, 4 CPU devices; against data parallelism",
    ("the demo on 4 CPU devices", _XLA): "the same; against XLA's sharding of the rows",
    ("a transformer in 2 stages, on 2 processes of a core each", _JIT + " on one core"): (
        "transformer, a stage on each of 2 cores; against jax.jit on one"
    ),
}
_WIDTH, _ROW, _TOP = 440, 46, 48
#: Where 1 ms and ten times as much are.
_ZERO, _DECADE = -15.0, 92.0
_STYLE = """
:root { color: #1f2328; }
@media (prefers-color-scheme: dark) { :root { color: #d6dae0; } }
.speedups { font: 13px system-ui, sans-serif; fill: currentColor; max-width: 100%; height: auto; }
.speedups .soft { opacity: 0.75; }
.speedups .grid { stroke: currentColor; opacity: 0.2; }
.speedups .other { fill: #8a8f98; stroke: #8a8f98; }
.speedups .ours { fill: #2f81d6; }
.speedups .gain { font-weight: 700; font-size: 15px; }
.speedups .end { text-anchor: end; }
.speedups .middle { text-anchor: middle; }
""".strip()


@dataclass(frozen=True)
class Result:
    """A row of the table: times of a step in ms, and how many times as fast autopar is."""

    theirs_ms: float
    ours_ms: float
    gain: float


def results(page: str) -> dict[tuple[str, str], Result]:
    """Reads the table: (step, the other side) -> result. A step that is "the same" is that of the row before."""
    row = re.compile(r"^\| ([^|]+); ([^|;]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) (times|of)", re.MULTILINE)
    found, last = {}, ""
    for step, other, theirs, ours, ratio, kind in row.findall(page):
        last = last + step.removeprefix("the same") if step.startswith("the same") else step
        found[last, other] = Result(float(theirs), float(ours), float(ratio) if kind == "times" else 1 / float(ratio))
    return found


def draw(page: str) -> str:
    """An SVG with a row for each result: both times on a logarithmic axis, and how many times as fast autopar is."""
    found = results(page)
    drawn = [(words, found[row]) for row, words in _DRAWN.items()]
    height = _TOP + _ROW * len(drawn) + 24
    said = ". ".join(f"{words}: {r.theirs_ms:g} ms, autopar {r.ours_ms:g} ms" for words, r in drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="speedups" width="{_WIDTH * 1.25:g}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(f"Time of a step. {said}.")}">',
        f"<style>\n{_STYLE}\n</style>",
        '<circle class="ours" cx="6" cy="12" r="5"/><text x="17" y="16.5">autopar</text>',
        '<circle class="other" cx="86" cy="12" r="5"/><text x="97" y="16.5">the other</text>',
        f'<text class="soft end" x="{_WIDTH}" y="16.5">time of a step, logarithmic</text>',
    ]
    for ms in (10, 100, 1000):
        at, text = _across(ms), f"{ms} ms" if ms < 1000 else "1 s"
        lines.append(f'<line class="grid" x1="{at}" y1="{_TOP - 14}" x2="{at}" y2="{height - 18}"/>')
        lines.append(f'<text class="soft middle" x="{at}" y="{height - 4}">{text}</text>')
    for k, (words, result) in enumerate(drawn):
        y, (step, against) = _TOP + _ROW * k, words.split("; ")
        a, b, line = _across(result.ours_ms), _across(result.theirs_ms), y + 17
        lines += [
            f'<text x="0" y="{y}">{escape(step)}<tspan class="soft">, {escape(against)}</tspan></text>',
            f'<line class="other" x1="{a}" y1="{line}" x2="{b}" y2="{line}" stroke-width="2"/>',
            f'<circle class="other" cx="{b}" cy="{line}" r="5"/><circle class="ours" cx="{a}" cy="{line}" r="5"/>',
            f'<text class="soft end" x="{min(a, b) - 9}" y="{line + 4.5}">{result.ours_ms:g}</text>',
            f'<text class="soft" x="{max(a, b) + 9}" y="{line + 4.5}">{result.theirs_ms:g} ms</text>',
            f'<text class="gain end" x="{_WIDTH}" y="{line + 5}">{_times(result.gain)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _across(ms: float) -> float:
    return round(_ZERO + _DECADE * math.log10(ms), 1)


def _times(gain: float) -> str:
    return f"{gain:.0f}\u00d7" if gain > 2.5 else f"{gain:.1f}\u00d7"


if __name__ == "__main__":
    shown = draw((_FOLDER / "results.md").read_text(encoding="utf-8"))
    (_FOLDER / "speedups.svg").write_text(shown, encoding="utf-8")
