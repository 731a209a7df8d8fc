"""What the plots of the benchmarks have in common."""

from pathlib import Path


def pyplot():
    """Matplotlib's pyplot, without a screen and in the style of all our plots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def save(figure, path: Path, **layout) -> None:
    """Lays a figure out, writes it and closes it.

    Args:
        figure: the figure.
        path: where it goes.
        **layout: of `tight_layout`.
    """
    figure.tight_layout(**layout)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)
