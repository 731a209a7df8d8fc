"""Throws random and adversarial strings at the maths reward: nothing may crash it, hang it or outlast its time limit.

Writes what happened as JSON, with the slowest strings and the graders' peak of memory. Exits with 1 when a call
raised, a grader process died, a string took longer than its limit or a sane answer was judged wrongly in between. A
string that reaches the limit is no failure: its score is 0. The strings depend on the seed only (tests/hostile.py).

    python benchmarks/fuzz_rewards.py [--count 100000] [--seed 0] [--limit 5] [--output fuzz_rewards.json]
"""

import argparse
import heapq
import json
import resource
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hostile import cases

from hacpo_trl import rewards

GRACE = 1.0
"""Seconds above the limit that ending a process may take on a busy machine."""


class TimedWorker(rewards._Worker):
    """A grader process that remembers how long its answers took."""

    seconds: list[float] = []

    def exchange(self, message, seconds, lines):
        """See `_Worker.exchange`; the start of a process is no answer."""
        started = time.perf_counter()
        try:
            return super().exchange(message, seconds, lines)
        finally:
            if message is not None:
                self.seconds.append(time.perf_counter() - started)


def fuzz(count: int, seed: int = 0, limit: float = 5.0, progress: bool = True) -> dict[str, Any]:
    """Judges `count` strings one by one.

    Args:
        count: how many strings.
        seed: of the strings.
        limit: seconds that a string may take.
        progress: whether to show a bar.

    Returns:
        What happened: counts of everything, the failures, the ten slowest strings, seconds by kind of string, and the
        graders' peak of memory in MiB.
    """
    plain_worker, rewards._Worker = rewards._Worker, TimedWorker
    crashes: list[dict[str, Any]] = []
    over: list[dict[str, Any]] = []
    slowest: list[tuple[float, int, dict[str, Any]]] = []
    scores: Counter[str] = Counter()
    by_kind: dict[str, list[float]] = {}
    under_1_ms = timeouts = wrong_checks = 0
    started = time.perf_counter()

    def short(case) -> dict[str, Any]:
        return {"kind": case.kind, "gold": ascii(case.gold[:120]), "text": ascii(case.text[:200])}

    with warnings.catch_warnings(), rewards.MathVerifier(timeout=limit, workers=1) as verifier:
        warnings.simplefilter("ignore")
        try:
            for number, case in enumerate(tqdm(cases(count, seed), total=count, unit="string", disable=not progress)):
                if number % 1000 == 0:  # what came before must not have spoiled the grader
                    checks = verifier.score(["72", "72"], [r"\boxed{72}", r"\boxed{73}"])
                    wrong_checks += checks != [1.0, 0.0]
                TimedWorker.seconds.clear()
                workers, before = set(verifier._live), verifier.timeouts
                try:
                    score = verifier.score([case.gold], [case.text])[0]
                except Exception as error:
                    crashes.append({**short(case), "error": f"{type(error).__name__}: {error}"[:300]})
                    continue
                timed_out = verifier.timeouts > before
                timeouts += timed_out
                if workers != set(verifier._live) and workers and not timed_out:
                    crashes.append({**short(case), "error": "the grader process died"})
                scores[str(score)] += 1
                seconds = sum(TimedWorker.seconds)
                under_1_ms += seconds < 1e-3
                total = by_kind.setdefault(case.kind, [0, 0.0])
                total[0] += 1
                total[1] += seconds
                if max(TimedWorker.seconds, default=0.0) > limit + GRACE:
                    over.append({**short(case), "seconds": round(seconds, 3)})
                entry = (seconds, number, {**short(case), "seconds": round(seconds, 3)})
                (heapq.heappush if len(slowest) < 10 else heapq.heappushpop)(slowest, entry)
        finally:
            rewards._Worker = plain_worker
    elapsed = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "count": count,
        "seed": seed,
        "limit": limit,
        "seconds": round(elapsed, 1),
        "strings_per_second": round(count / elapsed, 1),
        "crashes": len(crashes),
        "over_the_limit": len(over),
        "wrong_checks": wrong_checks,
        "reached_the_limit": timeouts,
        "under_1_ms": under_1_ms,
        "scores": dict(scores),
        "grader_peak_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit / 2**20),
        "by_kind": {
            kind: {"count": n, "mean_ms": round(1000 * seconds / n, 2)}
            for kind, (n, seconds) in sorted(by_kind.items())
        },
        "slowest": [entry for _, _, entry in sorted(slowest, key=lambda item: -item[0])],
        "failures": crashes[:50] + over[:50],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that a string may take")
    parser.add_argument("--output", default="fuzz_rewards.json")
    options = parser.parse_args()
    result = fuzz(options.count, options.seed, options.limit)
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
    shown = {key: value for key, value in result.items() if key not in ("slowest", "failures", "by_kind")}
    print(json.dumps(shown, indent=2))
    return int(bool(result["crashes"] or result["over_the_limit"] or result["wrong_checks"]))


if __name__ == "__main__":
    sys.exit(main())
