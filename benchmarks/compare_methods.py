"""Trains teams of tiny agents with every method and ablation over several seeds, on CPU cores.

    python benchmarks/compare_methods.py --out results             # everything, some hours on two cores
    python benchmarks/compare_methods.py --out results --quick     # one setting, two seeds, minutes
    python benchmarks/compare_methods.py --out results --settings skill --arms hacpo wide --seeds 5

All runs of a setting start from the same weights and see the same prompts. A run is one process and one thread, and
its result one JSON file: what is there already is not run again, and more seeds are added by asking for them. At the
end tables and plots are written (`compare_report.py`).
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", category=FutureWarning)

from compare_settings import (
    AGENTS,
    ARMS,
    GENERATIONS,
    HELD_OUT,
    LONG,
    MEAN_OF,
    PROMPTS,
    ROUNDS,
    SETTINGS,
    WARM_UP,
    agent_fingerprint,
    arms_of,
    options_of,
    rounds_of,
    run_file,
    run_fingerprint,
    task_of,
)
from tqdm.auto import tqdm

EVERY = ROUNDS // 2  # rounds between two measurements, with one sample in the middle of ROUNDS and all at its end
QUICK = {"settings": ["skill"], "arms": ["gspo", "gspo-x2", "hacpo", "positive-wide"], "seeds": 2}


def build_agent_folder(folder: Path, name: str) -> None:
    """Warms an agent up and saves it, unless it is there."""
    from hacpo_trl.playground import accuracy, build_agent, make_split, save_agent, warm_up

    target = folder / "agents" / name
    mark = target / "fingerprint"
    if mark.is_file() and mark.read_text() == agent_fingerprint(name):
        return
    recipe = AGENTS[name]
    model, tokenizer = build_agent(recipe.spec)
    practice, _ = make_split(recipe.practice, 20_000, 0, seed=100 + recipe.spec.seed)
    exam, _ = make_split(recipe.skill, 256, 0, seed=200)
    for chunk in range(WARM_UP["longest"] // WARM_UP["chunk"]):
        warm_up(
            model,
            tokenizer,
            practice,
            steps=WARM_UP["chunk"],
            batch_size=WARM_UP["batch_size"],
            learning_rate=WARM_UP["learning_rate"],
            seed=chunk,
            progress=False,
        )
        if accuracy(model, tokenizer, exam, sampled=True) >= recipe.target:
            break
    else:
        raise RuntimeError(f"{name} did not reach {recipe.target} in {WARM_UP['longest']} steps")
    shutil.rmtree(target, ignore_errors=True)
    save_agent(model, tokenizer, target)
    problems = held_out(recipe.task)
    (target / "start.json").write_text(json.dumps(measure(model, tokenizer, problems, 0, MEAN_OF)))
    mark.write_text(agent_fingerprint(name))


def held_out(task: tuple[str, ...]) -> dict[str, list[dict[str, str]]]:
    """The problems that nobody trains on, by task; the same for all runs."""
    from hacpo_trl.playground import make_split

    share = HELD_OUT // len(task)
    return {name: make_split(name, 0, share, seed=0)[1] for name in task}


def measure(model, tokenizer, problems: dict[str, list[dict[str, str]]], seed: int, samples: int) -> dict[str, Any]:
    """Accuracy of one agent, greedy and the mean over `samples` sampled responses, by task and of all."""
    from hacpo_trl.playground import accuracy

    result: dict[str, Any] = {"samples": samples, "greedy": {}, "sampled": {}}
    for task, ask in problems.items():
        result["greedy"][task] = accuracy(model, tokenizer, ask)
        result["sampled"][task] = accuracy(model, tokenizer, ask * samples, sampled=True, seed=seed)
    for kind in ("greedy", "sampled"):
        result[kind]["all"] = sum(result[kind].values()) / len(problems)  # every task has as many problems
    return result


def make_trainer(folder: Path, agents: tuple[str, ...], arm: str, rounds: int, seed: int):
    """A team in its starting state, quiet, that logs once a round; its files go to a scratch folder of the process."""
    import torch
    from transformers.utils import logging

    from hacpo_trl import HACPOConfig, HACPOTrainer
    from hacpo_trl.playground import answer_reward, make_dataset, make_split
    from hacpo_trl.reporting.round_progress import RoundProgress

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    prompts, _ = make_split(task_of(agents), PROMPTS * rounds, 0, seed=1000 + seed)
    args = HACPOConfig(
        str(folder / "scratch" / f"{os.getpid()}"),
        max_rounds=rounds,
        seed=seed,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **{"num_iterations": 1, **options_of(arm)},
    )
    args.logging_steps = args.updates_per_round(len(agents))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = HACPOTrainer(
            models=[str(folder / "agents" / name) for name in agents],
            reward_funcs=answer_reward,
            args=args,
            train_dataset=make_dataset(prompts),
            agent_names=list(agents),
        )
    trainer.remove_callback(RoundProgress)
    return trainer


def train(folder: Path, setting: str, agents: tuple[str, ...], arm: str, seed: int) -> float:
    """One run; its result goes to its file. Returns the seconds that it took."""
    from transformers import TrainerCallback

    started = time.perf_counter()
    rounds, entry = rounds_of(setting, agents), ARMS[arm]
    problems = held_out(task_of(agents))
    trainer = make_trainer(folder, agents, arm, rounds, seed)
    points: dict[str, list[dict[str, Any]]] = {
        name: [{"round": 0, "responses": 0, **_start(folder, name)}] for name in agents
    }

    class Measure(TrainerCallback):
        """Measures all agents several times in a run."""

        def on_step_end(self, args, state, control, **kwargs):
            done, rest = divmod(state.global_step, trainer.updates_per_round)
            if rest == 0 and done % EVERY == 0:
                for agent in trainer.agents:
                    samples = MEAN_OF if done % ROUNDS == 0 or done == rounds else 1
                    values = measure(agent.model, agent.processing_class, problems, 1 + seed, samples)
                    responses = done * PROMPTS * GENERATIONS * entry.times
                    points[agent.agent_name].append({"round": done, "responses": responses, **values})

    trainer.add_callback(Measure())
    trainer.train()
    history = trainer.state.log_history
    result = {
        "setting": None if entry.alone else setting,
        "arm": arm,
        "seed": seed,
        "fingerprint": run_fingerprint(agents, arm, rounds),
        "options": options_of(arm),
        "agents": {
            name: {"points": points[name], "rewards": [h[f"{name}/reward"] for h in history if f"{name}/reward" in h]}
            for name in agents
        },
        "pairs": _pairs(history),
        "seconds": time.perf_counter() - started,
    }
    path = run_file(folder, setting, agents, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps(result))
    os.replace(part, path)
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    return result["seconds"]


def _start(folder: Path, name: str) -> dict[str, Any]:
    """What was measured of an agent after its warm-up."""
    return json.loads((folder / "agents" / name / "start.json").read_text())


def _pairs(history: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """The metrics of every pair, by round."""
    pairs: dict[str, dict[str, list[float]]] = {}
    for entry in history:
        for key, value in entry.items():
            if key.startswith("pair/"):
                _, pair, name = key.split("/", 2)
                pairs.setdefault(pair, {}).setdefault(name, []).append(value)
    return pairs


def plan(folder: Path, settings: list[str], arms: list[str], seeds: int | None) -> list[tuple]:
    """The runs that are asked for and not done yet, seed by seed."""
    jobs: dict[Path, tuple] = {}
    for name in settings:
        for arm in (arm for arm in arms_of(name) if arm in arms):
            team = SETTINGS[name].agents
            for agents in [(agent,) for agent in team] if ARMS[arm].alone else [team]:
                for seed in range(ARMS[arm].seeds if seeds is None else seeds):
                    path = run_file(folder, name, agents, arm, seed)
                    done = path.is_file() and json.loads(path.read_text())["fingerprint"] == run_fingerprint(
                        agents, arm, rounds_of(name, agents)
                    )
                    if not done:
                        jobs[path] = (name, agents, arm, seed)
    return sorted(jobs.values(), key=lambda job: job[3])


def main() -> None:
    described = "\n".join(
        [f"  {name:<28}{s.about} ({', '.join(s.agents)})" for name, s in SETTINGS.items()]
        + ["methods (a setting leaves some out, see compare_settings.py):"]
        + [f"  {name:<28}{arm.about}; {arm.seeds} seeds" for name, arm in ARMS.items()]
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"settings:\n{described}"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of agents, results, tables and plots")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        metavar="SETTING",
        default=[name for name, setting in SETTINGS.items() if setting.rounds <= LONG],
        help=f"default: all of at most {LONG} rounds",
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="METHOD", default=list(ARMS), help="methods to run; default: all"
    )
    parser.add_argument("--seeds", type=int, help="the first SEEDS runs of every method; default: as listed below")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each; default: one for each core"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"instead of --settings, --arms and --seeds: {QUICK['seeds']} seeds of {', '.join(QUICK['arms'])} "
        f"in {', '.join(QUICK['settings'])}",
    )
    parser.add_argument(
        "--report_only", action="store_true", help="run nothing, write tables and plots of all methods"
    )
    options = parser.parse_args()
    if options.quick:
        options.settings, options.arms, options.seeds = QUICK["settings"], QUICK["arms"], QUICK["seeds"]
    if options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        parser.error("--jobs and --seeds must be at least 1")
    if not options.report_only:
        run_all(options.out, options.settings, options.arms, options.seeds, options.jobs)
    from compare_report import write_report

    print(write_report(options.out, options.settings))


def run_all(folder: Path, settings: list[str], arms: list[str], seeds: int | None, jobs: int) -> None:
    """Warms the agents up and makes the runs, several at a time.

    Raises:
        RuntimeError: when runs failed; all others are done then.
    """
    started = time.perf_counter()
    failed: list[str] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        names = sorted({agent for name in settings for agent in SETTINGS[name].agents})
        for future in tqdm(
            as_completed([pool.submit(build_agent_folder, folder, name) for name in names]),
            total=len(names),
            desc="warm-up",
            unit="agent",
        ):
            future.result()
        runs = plan(folder, settings, arms, seeds)
        for name in settings:
            left = [arm for arm in arms if arm not in arms_of(name)]
            if left and len(arms) < len(ARMS):  # asked for by name
                print(f"{name}: without {', '.join(left)}.")
        futures = {pool.submit(train, folder, *job): job for job in runs}
        bar = tqdm(as_completed(futures), total=len(futures), desc="runs", unit="run")
        for future in bar:
            setting, agents, arm, seed = futures[future]
            if future.exception() is not None:
                failed.append(f"{futures[future]}: {future.exception()!r}")
                bar.write(f"failed: {failed[-1]}", file=sys.stderr)
            else:
                bar.set_postfix_str(
                    f"{setting} {'+'.join(agents)} {arm} {seed}: {future.result():.0f} s", refresh=False
                )
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    print(f"{len(runs) - len(failed)} runs in {(time.perf_counter() - started) / 60:.1f} minutes.")
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed; run the command again for them:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
