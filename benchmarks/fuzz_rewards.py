"""Throws random and adversarial strings at the maths reward: nothing may crash it, hang it or outlast its time limit.

Writes what happened as JSON, with the slowest strings and the graders' peak of memory. Exits with 1 when a call
raised, a grader process died, a string took longer than its limit or a sane answer was judged wrongly in between. A
string that reaches the limit is no failure: its score is 0. The strings depend on the seed only
(tests/support/adversarial_strings.py). Ctrl-C writes what is known so far, and `--start` goes on from there.

    python benchmarks/fuzz_rewards.py [--count 100000] [--seed 0] [--limit 5]
"""

import argparse
import heapq
import itertools
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

from support.adversarial_strings import Case, cases

from hacpo_trl.maths import reward as rewards

GRACE = 1.0
"""Seconds above the limit that ending a process may take. A string that takes longer is tried again: on a busy machine
a process may be ended late."""


class TimedWorker(rewards._Worker):
    """A grader process that remembers how long its answers took, and whether it died without being ended."""

    seconds: list[float] = []
    deaths: list[int] = []

    def exchange(self, message, seconds, lines):
        """See `_Worker.exchange`; the start of a process is no answer."""
        started = time.perf_counter()
        replies, expired = super().exchange(message, seconds, lines)
        if message is not None:
            self.seconds.append(time.perf_counter() - started)
            if not expired and len(replies) < lines and not (replies and replies[-1].get("gold") is False):
                self.deaths.append(self.process.pid)
        return replies, expired


def fuzz(count: int, seed: int = 0, limit: float = 5.0, start: int = 0, progress: bool = True) -> dict[str, Any]:
    """Judges `count` strings one by one, or as many as there were before Ctrl-C.

    Args:
        count: how many strings.
        seed: of the strings.
        limit: seconds that a string may take.
        start: how many strings of this seed are left out at the start.
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
    under_1_ms = timeouts = wrong_checks = done = 0
    started = time.perf_counter()

    with warnings.catch_warnings(), rewards.MathVerifier(timeout=limit, workers=1) as verifier:
        warnings.simplefilter("ignore")

        def judge(case: Case) -> float | None:
            TimedWorker.seconds.clear()
            TimedWorker.deaths.clear()
            verifier._bad_golds.clear()  # every string is judged, also for the second time
            return verifier.score([case.gold], [case.text])[0]

        strings = itertools.islice(cases(start + count, seed), start, None)
        try:
            for number, case in enumerate(tqdm(strings, total=count, unit="string", disable=not progress), start):
                if number % 1000 == 0:  # what came before must not have spoiled the grader
                    checks = verifier.score(["72", "72"], [r"\boxed{72}", r"\boxed{73}"])
                    wrong_checks += checks != [1.0, 0.0]
                about = {
                    "number": number,
                    "kind": case.kind,
                    "gold": ascii(case.gold[:120]),
                    "text": ascii(case.text[:200]),
                }
                before = verifier.timeouts
                try:
                    score = judge(case)
                    longest = max(TimedWorker.seconds, default=0.0)
                    seconds = sum(TimedWorker.seconds)
                    timed_out = verifier.timeouts > before
                    if TimedWorker.deaths:
                        crashes.append({**about, "error": "the grader process died"})
                    if longest > limit + GRACE:
                        judge(case)
                        if max(TimedWorker.seconds, default=0.0) > limit + GRACE:
                            over.append({**about, "seconds": round(longest, 3)})
                except Exception as error:
                    crashes.append({**about, "error": f"{type(error).__name__}: {error}"[:300]})
                else:
                    timeouts += timed_out
                    scores[str(score)] += 1
                    under_1_ms += seconds < 1e-3
                    total = by_kind.setdefault(case.kind, [0, 0.0])
                    total[0] += 1
                    total[1] += seconds
                    entry = (seconds, number, {**about, "seconds": round(seconds, 3)})
                    (heapq.heappush if len(slowest) < 10 else heapq.heappushpop)(slowest, entry)
                done += 1
        except KeyboardInterrupt:
            pass
        finally:
            rewards._Worker = plain_worker
    elapsed = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "count": done,
        "start": start,
        "seed": seed,
        "limit": limit,
        "seconds": round(elapsed, 1),
        "strings_per_second": round(done / elapsed, 1),
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
    parser.add_argument("--start", type=int, default=0, help="strings of this seed to leave out")
    parser.add_argument("--output", default="fuzz_rewards.json")
    options = parser.parse_args()
    result = fuzz(options.count, options.seed, options.limit, options.start)
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
    shown = {key: value for key, value in result.items() if key not in ("slowest", "failures", "by_kind")}
    print(json.dumps(shown, indent=2))
    return int(bool(result["crashes"] or result["over_the_limit"] or result["wrong_checks"]))


if __name__ == "__main__":
    sys.exit(main())
