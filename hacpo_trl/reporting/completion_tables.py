"""What the agents wrote: one Parquet table a round for the whole team, OUTPUT_DIR/completions/round_00001.parquet.

A row is a response. Its columns:

| column | meaning |
|---|---|
| round | counted from 1 |
| agent | who wrote it |
| prompt | as in the data set: text, or a chat's messages |
| completion | the response as text, without special tokens |
| gold | the right answer, where the data set has a column "answer" (else "final_answer", "gold", "target", ...) |
| reward | weighted sum of the reward functions; null when none of them could score it |
| rewards/<function> | of each function |
| finish_reason | "stop": it ended itself; "length": it was cut at the limit |
| tokens | its length in the agent's tokens |
| advantage | for the agent that wrote it |
| parsed_answer | what the reward function took for its answer; null when the function does not tell |

A reward function tells by TRL's `log_extra("parsed_answer", texts)`, one text a completion, as `math_reward` does.
What it logs under other names becomes further columns.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from accelerate.utils import gather_object
from torch import Tensor
from transformers.utils import is_rich_available
from trl import GRPOConfig

from ..maths.problems import gold_column
from ..rollouts import Rollout
from .run_page import COMPLETIONS, completion_tables, readable


class CompletionTables:
    """Writes the tables of a run.

    Args:
        args: the run's settings.
        is_main_process: whether this process writes.
    """

    def __init__(self, args: GRPOConfig, is_main_process: bool):
        self.args = args
        self.is_main_process = is_main_process
        self._golds: list[Any] | None = None

    def begin_run(self, finished_rounds: int) -> None:
        """Removes tables of rounds that are yet to come: an earlier run's, or those that a resumed run redoes.

        Args:
            finished_rounds: how many rounds the run has behind it.
        """
        if self.is_main_process:
            for number, path in completion_tables(self.args.output_dir).items():
                if number > finished_rounds:
                    os.remove(path)

    def begin_round(self, inputs: Sequence[dict[str, Any]]) -> None:
        """Keeps the golds of a round.

        Args:
            inputs: a row of the data set for each response of an agent on this process.
        """
        column = gold_column(inputs[0])
        self._golds = None if column is None else [row.get(column) for row in inputs]

    def write(
        self,
        number: int,
        names: Sequence[str],
        rollouts: Sequence[Rollout],
        advantages: Tensor,
        logs: Sequence[dict[str, Any]],
    ) -> None:
        """Writes the table of the round that has just been sampled. All processes must take part.

        Args:
            number: of the round, from 1.
            names: of the agents.
            rollouts: of all agents, on this process.
            advantages: (N, B * G) of each agent's own responses, on all processes.
            logs: what TRL keeps of each agent's responses: "prompt", "rewards", and "extra" of the reward functions.
        """
        golds = None if self._golds is None else gather_object(self._golds)
        parts = []
        for name, rollout, own, log in zip(names, rollouts, advantages.tolist(), logs, strict=True):
            local = zip(rollout.texts, rollout.finished, map(len, rollout.completion_ids), strict=True)
            texts, finished, tokens = zip(*gather_object(list(local)), strict=True)
            part = {
                "round": [number] * len(texts),
                "agent": [name] * len(texts),
                "prompt": list(log["prompt"]),
                "completion": texts,
                **({} if golds is None else {"gold": golds}),
                "reward": rollout.rewards.tolist(),
                **{f"rewards/{function}": list(values) for function, values in log["rewards"].items()},
                "finish_reason": ["stop" if done else "length" for done in finished],
                "tokens": tokens,
                "advantage": own,
            }
            for column, values in log["extra"].items():
                if len(values) == len(texts):  # else the function has not logged one value a completion
                    part[f"extra/{column}" if column in part else column] = list(values)
            parts.append(part)
        if self.is_main_process:
            table = _table(parts)
            self._keep(table, number)
            self._show(table)
            self._report(table)

    def _keep(self, table: pa.Table, number: int) -> None:
        folder = os.path.join(self.args.output_dir, COMPLETIONS)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"round_{number:05d}.parquet")
        pq.write_table(table, f"{path}.unfinished")
        os.replace(f"{path}.unfinished", path)  # a killed run leaves no half-written table

    def _show(self, table: pa.Table) -> None:
        """Prints as many responses of every agent as the settings wish."""
        count = self.args.num_completions_to_print
        if not count or not is_rich_available():
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        functions = [name for name in table.column_names if name.startswith("rewards/")]
        titles = {"prompt": "prompt", "completion": "response", "gold": "gold", "parsed_answer": "read as"}
        titles |= {name: name.removeprefix("rewards/") for name in functions} | {"advantage": "advantage"}
        titles = {name: title for name, title in titles.items() if name in table.column_names}
        for name, rows in table.to_pandas().groupby("agent", sort=False):
            shown = Table(title=f"Round {rows['round'].iloc[0]}, {name}", title_justify="left", show_lines=True)
            for title in titles.values():
                shown.add_column(title)
            for row in rows.head(count).to_dict("records"):
                shown.add_row(*(Text(readable(row[name])) for name in titles))
            Console().print(shown)

    def _report(self, table: pa.Table) -> None:
        """Sends the table to those trackers that show tables, as TRL does."""
        report_to = self.args.report_to or []
        trackers = []
        if "wandb" in report_to:
            import wandb

            trackers += [wandb] if wandb.run is not None else []
        if "trackio" in report_to:
            import trackio

            trackers.append(trackio)
        if not trackers:
            return
        frame = table.to_pandas()
        if self.args.log_unique_prompts:
            frame = frame[~(frame["agent"] + frame["prompt"].astype(str)).duplicated()]
        for tracker in trackers:
            tracker.log({"completions": tracker.Table(dataframe=frame)})


def _table(parts: Sequence[dict[str, Sequence[Any]]]) -> pa.Table:
    """One table of all agents' columns, null where an agent has not got one."""
    names = list(dict.fromkeys([name for part in parts for name in part] + ["parsed_answer"]))
    columns = {}
    for name in names:
        values = [value for part in parts for value in part.get(name, [None] * len(part["round"]))]
        if name in ("reward", "advantage") or name.startswith("rewards/"):
            columns[name] = pa.array([None if v is None or math.isnan(v) else v for v in values], pa.float64())
        elif name in ("completion", "parsed_answer"):
            columns[name] = _text_array(values)
        else:
            columns[name] = _any_array(values)
    return pa.table(columns)


def _text_array(values: Sequence[Any]) -> pa.Array:
    # Lone surrogates have no UTF-8
    clean = [None if v is None else str(v).encode("utf-8", "replace").decode() for v in values]
    return pa.array(clean, pa.string())


def _any_array(values: list[Any]) -> pa.Array:
    """With the type that fits all values; as texts where none does."""
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeError, TypeError, ValueError, OverflowError):
        return _text_array(values)
