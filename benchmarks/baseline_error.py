"""How far the baselines of the advantage are from a learner's true chance, by simulation.

    python benchmarks/baseline_error.py --out results

Two agents answer prompts of different difficulty. The strong one's chance of a right answer varies over the prompts
(Beta distributed, mean 0.6); the weak one's is

- "scaled": the strong one's divided by the capability ratio, on every prompt: what eq. (5) supposes;
- "apart": drawn anew for every prompt with the mean 0.6 / ratio: skills that do not follow each other.

For every baseline, learner, ratio and number G of responses: the bias, mean over prompts of E[mu] - chance, and the
root mean square of mu - chance. Capabilities are the true ones, so that only the baseline is measured.
"""

import argparse
import json
from pathlib import Path

import torch
from plots import pyplot, save
from tqdm.auto import tqdm

from hacpo_trl.objective import BASELINES, learner_baselines

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
GENERATIONS = (4, 8, 16, 32, 64)
STRONG = 0.6
CONCENTRATION = 4.0  # a + b of the Beta distribution of chances
WORLDS = {"scaled": "skills in proportion", "apart": "skills apart"}


def chances(world: str, ratio: float, prompts: int, generator: torch.Generator) -> torch.Tensor:
    """(2, B) chance of a right answer: the weak agent's, then the strong one's."""

    def beta(mean: float) -> torch.Tensor:
        # by the inverse of the distribution function: torch.distributions takes no generator
        grid = torch.linspace(1e-4, 1 - 1e-4, 20_001, dtype=torch.float64)
        a, b = mean * CONCENTRATION, (1 - mean) * CONCENTRATION
        density = grid.pow(a - 1) * (1 - grid).pow(b - 1)
        cumulative = density.cumsum(0) / density.sum()
        uniform = torch.rand(prompts, generator=generator, dtype=torch.float64)
        return grid[torch.searchsorted(cumulative, uniform).clamp(max=len(grid) - 1)]

    strong = beta(STRONG)
    weak = strong / ratio if world == "scaled" else beta(STRONG / ratio)
    return torch.stack([weak, strong])


def simulate(world: str, ratio: float, generations: int, prompts: int, seed: int) -> list[dict]:
    """Bias and root mean square error of every baseline, for the weak and the strong learner."""
    generator = torch.Generator().manual_seed(seed)
    chance = chances(world, ratio, prompts, generator)  # (2, B)
    draws = torch.rand(2, prompts, generations, generator=generator, dtype=torch.float64)
    rewards = (draws < chance[..., None]).double()  # (2, B, G)
    capabilities = torch.tensor([STRONG / ratio, STRONG], dtype=torch.float64)
    rows = []
    for baseline in BASELINES:
        error = learner_baselines(rewards, capabilities, baseline=baseline) - chance  # (2, B)
        for k, learner in enumerate(("weak", "strong")):
            rows.append(
                {
                    "world": world,
                    "ratio": ratio,
                    "generations": generations,
                    "baseline": baseline,
                    "learner": learner,
                    "bias": error[k].mean().item(),
                    "bias_error": (error[k].std() / prompts**0.5).item(),
                    "rmse": error[k].square().mean().sqrt().item(),
                }
            )
    return rows


def plot(rows: list[dict], path: Path, generations: int = 8) -> None:
    """Bias and error over the capability ratio, for one number of responses."""
    plt = pyplot()
    colors = dict(zip(BASELINES, ("#1f5fa8", "#d1622b", "#8e44ad", "#2c8a4b"), strict=True))
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.4), sharex=True, sharey="row")
    columns = [(world, learner) for world in WORLDS for learner in ("weak", "strong")]
    for column, (world, learner) in enumerate(columns):
        for row, (measure, label) in enumerate({"bias": "bias", "rmse": "root mean square error"}.items()):
            axis = axes[row][column]
            for baseline in BASELINES:
                chosen = [
                    r
                    for r in rows
                    if (r["world"], r["learner"], r["baseline"], r["generations"])
                    == (world, learner, baseline, generations)
                ]
                axis.plot(
                    [r["ratio"] for r in chosen],
                    [r[measure] for r in chosen],
                    marker="o",
                    markersize=3,
                    color=colors[baseline],
                    label=baseline,
                )
            axis.grid(alpha=0.25)
            axes[row][0].set_ylabel(label)
        axes[0][column].axhline(0, color="black", linewidth=0.6)
        axes[0][column].set_title(f"{WORLDS[world]}, {learner} learner", fontsize=9)
        axes[1][column].set_xlabel("capability ratio")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"Baseline minus the learner's true chance, {generations} responses of each agent")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures (JSON) and the plot")
    parser.add_argument("--prompts", type=int, default=20_000, help="simulated prompts of each case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(world, ratio, count) for world in WORLDS for ratio in RATIOS for count in GENERATIONS]
    rows = []
    for world, ratio, count in tqdm(cases, unit="case"):
        rows += simulate(world, ratio, count, options.prompts, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "baseline_error.json").write_text(json.dumps(rows, indent=1))
    plot(rows, options.out / "baseline_error.png")
    for world in WORLDS:
        print(f"\n{WORLDS[world]}, ratio 4, 8 responses of each agent")
        for r in rows:
            if (r["world"], r["ratio"], r["generations"]) == (world, 4.0, 8):
                print(
                    f"  {r['learner']:<7} {r['baseline']:<13} bias {r['bias']:+.4f} ± {r['bias_error']:.4f}"
                    f"   rmse {r['rmse']:.4f}"
                )


if __name__ == "__main__":
    main()
