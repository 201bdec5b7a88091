"""Draws the pictures of the docs: `python docs/pictures/draw.py` writes the SVG files beside this one (or into a folder
that is named).

Each has a background of its own, so that it is readable on light and on dark pages.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
SANS = "'DejaVu Sans', Verdana, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, GREY, PAPER, LINE = "#1f2933", "#52606d", "#ffffff", "#7b8794"
BLUE, ORANGE, GREEN, YELLOW, RED = "#d6e6fb", "#fde3cf", "#d9f0e0", "#fdf3cd", "#b3261e"


@dataclass
class Picture:
    """An SVG under construction. Coordinates are pixels; text is placed by the middle of its line."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 14, bold: bool = False, mono: bool = False,
        colour: str = INK, anchor: str = "middle", italic: bool = False,
    ) -> None:  # fmt: skip
        style = f'font-family="{MONO if mono else SANS}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
        style += ' font-weight="bold"' if bold else ""
        style += ' font-style="italic"' if italic else ""
        self.parts.append(f'<text x="{x:g}" y="{y + size * 0.35:g}" {style}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = PAPER, dashed: bool = False,
        radius: float = 8,
    ) -> None:  # fmt: skip
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{LINE}" stroke-width="1.4"{dash}/>'
        )

    def lines(self, x: float, y: float, rows: list[tuple[str, dict[str, object]]], leading: float = 20) -> None:
        """Rows of text around the middle ``(x, y)``."""
        top = y - leading * (len(rows) - 1) / 2
        for number, (words, style) in enumerate(rows):
            self.text(x, top + number * leading, words, **style)  # type: ignore[arg-type]

    def arrow(self, *points: tuple[float, float], colour: str = GREY) -> None:
        """A broken line with a head at its last point."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'marker-end="url(#head-{colour[1:]})"/>'
        )

    def save(self, name: str) -> None:
        heads = "".join(
            f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
            for colour in (GREY, RED)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img"><title>{escape(self.title)}</title>'
            f"<defs>{heads}</defs>"
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="12" fill="{PAPER}" '
            'stroke="#cbd2d9"/>'
        )
        (FOLDER / name).write_text("\n".join([head, *self.parts, "</svg>"]) + "\n")


def draw_pieces() -> None:
    """How the pieces fit: envs and a policy go in, batches come out, weights go back."""
    picture = Picture(900, 400, "Envs and a policy go into a collector; batches go to training; weights come back")
    picture.box(24, 40, 190, 112, fill=GREEN)
    picture.lines(119, 96, [
        ("envs", {"bold": True, "size": 16}),
        ("Gymnasium, vector envs,", {"size": 13}),
        ("many side by side,", {"size": 13}),
        ("or your own", {"size": 13}),
    ])  # fmt: skip
    picture.box(24, 190, 190, 112, fill=ORANGE)
    picture.lines(119, 246, [
        ("policy", {"bold": True, "size": 16}),
        ("a module, a function,", {"size": 13}),
        ("recurrent or not;", {"size": 13}),
        ("none: random actions", {"size": 13}),
    ])  # fmt: skip
    picture.box(282, 24, 290, 294, fill=BLUE)
    picture.text(427, 50, "collector", bold=True, size=16)
    picture.box(306, 74, 242, 78)
    picture.lines(427, 113, [
        ("one rollout loop", {"size": 14}),
        ("act · step · reset what ended", {"mono": True, "size": 12}),
    ])  # fmt: skip
    picture.text(427, 172, "which runs in", size=13, colour=GREY)
    for number, (where, who) in enumerate((
        ("this process", "Collector"),
        ("worker processes", "MultiCollector"),
        ("nodes", "RayCollector, …"),
    )):  # fmt: skip
        picture.box(306, 188 + number * 41, 242, 34)
        picture.text(316, 205 + number * 41, where, size=12, anchor="start")
        picture.text(540, 205 + number * 41, who, size=11, mono=True, anchor="end", colour=GREY)
    picture.arrow((214, 96), (282, 96))
    picture.arrow((214, 246), (282, 246))
    picture.box(664, 40, 212, 70, fill=YELLOW)
    picture.lines(770, 75, [
        ("batches", {"bold": True, "size": 16}),
        ("TensorDict [envs, time]", {"mono": True, "size": 12}),
    ])  # fmt: skip
    picture.box(664, 132, 212, 70, fill=YELLOW)
    picture.lines(770, 167, [
        ("replay buffer", {"bold": True, "size": 16}),
        ("in the background: start()", {"size": 12}),
    ])  # fmt: skip
    picture.box(664, 246, 212, 72, fill=PAPER)
    picture.lines(770, 282, [
        ("your training loop", {"bold": True, "size": 16}),
        ("loss, optimizer", {"size": 13}),
    ])  # fmt: skip
    picture.arrow((572, 75), (664, 75))
    picture.text(618, 62, "either", size=12, colour=GREY, italic=True)
    picture.arrow((572, 167), (664, 167))
    picture.text(618, 154, "or", size=12, colour=GREY, italic=True)
    picture.arrow((770, 202), (770, 246))
    picture.arrow((876, 75), (888, 75), (888, 282), (876, 282))
    picture.arrow((770, 318), (770, 356), (427, 356), (427, 318))
    picture.text(598, 375, "update_policy_weights_()", mono=True, size=13)
    picture.save("pieces.svg")


def draw_choosing() -> None:
    """Which collector: questions on the left, answers on the right."""
    picture = Picture(900, 636, "Which collector to choose, by five questions")
    questions = [
        ["Do envs run on", "more than one machine?"],
        ["Are a policy and all envs in one", "process fast enough?"],
        ["Must there be one policy only?", "(large, or on a GPU)"],
        ["Must every frame be of", "the newest weights? (PPO, A2C)"],
    ]
    left, width, height, pitch, top = 30, 300, 76, 116, 30
    extra = 68  # the third question has two answers
    for number, rows in enumerate(questions):
        y = top + number * pitch + (extra if number > 2 else 0)
        picture.box(left, y, width, height, fill=BLUE)
        picture.lines(left + width / 2, y + height / 2, [(row, {"size": 14}) for row in rows])
    for number in range(3):
        y = top + number * pitch + height
        end = y + pitch - height + (extra if number == 2 else 0)
        picture.arrow((left + 150, y), (left + 150, end))
        picture.text(left + 166, y + 19, "no", size=13, bold=True, anchor="start")

    def answer(y: float, name: str, note: str, x: float = 470) -> None:
        picture.box(x, y, 870 - x, 64, fill=GREEN)
        picture.lines(x + (870 - x) / 2, y + 32, [
            (name, {"mono": True, "size": 13, "bold": True}),
            (note, {"size": 12, "colour": GREY}),
        ], leading=21)  # fmt: skip

    def yes(y: float, label: str = "yes", start: float = 330, end: float = 470) -> None:
        picture.arrow((start, y), (end, y))
        picture.text((start + end) / 2 - 4, y - 12, label, size=13, bold=True)

    yes(68)
    answer(36, "RayCollector · DistributedCollector", 'Slurm: launcher="submitit"; each node may have workers')
    yes(184)
    answer(152, "Collector(SerialEnv(n, make_env), …)", "the simplest; often enough for cheap envs")
    picture.box(420, 262, 160, 76, fill=BLUE)
    picture.lines(500, 300, [("Do steps take", {"size": 13}), ("equally long?", {"size": 13})])
    yes(300, start=330, end=420)
    picture.arrow((580, 286), (626, 286))
    picture.text(601, 274, "yes", size=12, bold=True)
    answer(258, "Collector(ParallelEnv(n, …))", "all wait for the slowest", x=626)
    picture.arrow((500, 338), (500, 378), (626, 378))
    picture.text(516, 357, "no", size=12, bold=True, anchor="start")
    answer(346, "AsyncBatchedCollector", "whichever envs are ready", x=626)
    yes(484)
    answer(452, "MultiCollector(…, sync=True)", "nothing is collected while you train")
    picture.arrow((180, 522), (180, 576), (470, 576))
    picture.text(196, 547, "no", size=13, bold=True, anchor="start")
    answer(544, "MultiCollector(…, sync=False)", "SAC, DQN; with a replay buffer and start()")
    picture.save("choosing.svg")


def draw_episode() -> None:
    """What four steps around an episode's end look like, key by key."""
    picture = Picture(
        900, 392, "An episode's end in the data: next holds the true last observation, the root the reset"
    )
    columns = [("t = 2", BLUE), ("t = 3", BLUE), ("t = 4", ORANGE), ("t = 5", ORANGE)]
    rows = [
        ("observation", ["o2", "o3", "o0′", "o1′"]),
        ("action", ["a2", "a3", "a0′", "a1′"]),
        ('"next", observation', ["o3", "o4", "o1′", "o2′"]),
        ('"next", reward', ["r3", "r4", "r1′", "r2′"]),
        ('"next", done', ["False", "True", "False", "False"]),
        ("done (root)", ["False"] * 4),
        ('"collector", traj_ids', ["7", "7", "12", "12"]),
    ]
    left, top, width, height, gap = 230, 66, 112, 34, 44
    starts = [left + number * (width + 26) + (gap if number > 1 else 0) for number in range(4)]
    for (name, fill), x in zip(columns, starts, strict=True):
        picture.text(x + width / 2, 44, name, size=14, bold=True)
        for number in range(len(rows)):
            picture.box(x, top + number * (height + 6), width, height, fill=fill, radius=5)
    for number, (key, values) in enumerate(rows):
        y = top + number * (height + 6) + height / 2
        picture.text(left - 16, y, key, size=13, mono=True, anchor="end")
        for value, x in zip(values, starts, strict=True):
            special = value in ("o4", "True", "o0′")
            picture.text(x + width / 2, y, value, size=14, mono=True, bold=special, colour=RED if special else INK)
    for first, second in ((0, 1), (2, 3)):  # what comes next is the root of the step after
        x, end = starts[first] + width, starts[second]
        picture.arrow((x, top + 2 * (height + 6) + height / 2), (end, top + height / 2))
    boundary = (starts[1] + width + starts[2]) / 2
    picture.parts.append(
        f'<line x1="{boundary:g}" y1="30" x2="{boundary:g}" y2="350" stroke="{RED}" stroke-width="2" '
        'stroke-dasharray="6 5"/>'
    )
    picture.text(boundary, 20, "this env, and no other, is reset here", size=13, colour=RED)
    picture.text(
        450, 369, "o4, the true last observation, is only in “next”; o0′, of the reset, only at the root.", size=13
    )
    picture.save("episode.svg")


if __name__ == "__main__":
    draw_pieces()
    draw_choosing()
    draw_episode()
