"""Draws the picture of the method in the README.

python docs/make_pictures.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, ORANGE, GREEN, GRAY = "#1f5fa8", "#d1622b", "#2c8a4b", "#5d6d7e"
AGENTS = (("agent 1", "its tokenizer,\nits template", BLUE), ("agent 2", "another family,\nsize, tokenizer", ORANGE),
          ("agent N", "...", GREEN))  # fmt: skip
HEIGHTS = (3.3, 2.0, 0.7)


def box(axis, x, y, width, height, text, color, *, fill=0.12, bold=False):
    """A rounded box with centred text."""
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.02,rounding_size=0.12", linewidth=1.5,
        edgecolor=color, facecolor=matplotlib.colors.to_rgba(color, fill),
    )  # fmt: skip
    axis.add_patch(patch)
    axis.text(x, y, text, ha="center", va="center", fontsize=10, weight="bold" if bold else "normal")


def arrow(axis, start, end, color, **kwargs):
    """An arrow between two points."""
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, **kwargs))


def main() -> None:
    figure, axis = plt.subplots(figsize=(11, 4.1), layout="constrained")
    axis.set(xlim=(0, 14.2), ylim=(-0.15, 4.45))
    axis.axis("off")
    box(axis, 1.0, 2.0, 1.6, 1.1, "the same\nprompts", GRAY, bold=True)
    box(axis, 6.6, 2.0, 1.9, 3.2, "pool\n\nall responses\nas text,\neach graded\nonce", GRAY, bold=True)
    for (name, detail, color), y in zip(AGENTS, HEIGHTS, strict=True):
        box(axis, 3.6, y, 2.1, 0.95, f"{name}\n{detail}", color)
        arrow(axis, (1.85, 2.0), (2.5, y), GRAY)
        arrow(axis, (4.7, y), (5.6, 2.0 + (y - 2.0) * 0.75), color)
        box(axis, 9.7, y, 2.5, 0.95, "own responses: GSPO\npeers': weighted, clipped", color)
        arrow(axis, (7.6, 2.0 + (y - 2.0) * 0.75), (8.4, y), GRAY)
        box(axis, 12.9, y, 2.1, 0.95, f"{name}\nan ordinary model", color, fill=0.25, bold=True)
        arrow(axis, (11.0, y), (11.8, y), color)
    for x, text in ((3.6, "1  sample"), (6.6, "2  verify"), (9.7, "3  learn from all"), (12.9, "4  run alone")):
        axis.text(x, 4.2, text, ha="center", va="center", fontsize=11, color=GRAY, weight="bold")
    figure.savefig(Path(__file__).parent / "method.png", dpi=130)


if __name__ == "__main__":
    main()
