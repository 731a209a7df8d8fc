"""The command `hacpo`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from .._version import __version__
from ..sampling import vllm_servers
from .console import end_interrupted, start_quietly

_WHOLE = {
    "train": "hacpo_trl.cli.train",
    "evaluate": "hacpo_trl.cli.evaluate",
    "quickstart": "hacpo_trl.cli.quickstart",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        arguments: by default those of the process. What follows "--" goes to the servers of `hacpo serve`.

    Returns:
        The exit code, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    start_quietly()
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # that the command does not know better
        return end_interrupted(arguments[0], "Nothing is written yet.")


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _WHOLE:  # these have parsers of their own
        return importlib.import_module(_WHOLE[arguments[0]]).main(arguments[1:])
    extra: list[str] = []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, extra = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser("hacpo", description="Different language models learn together by HACPO.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    subparsers.add_parser("train", help="train a team on maths problems; hacpo train --help lists all settings")
    subparsers.add_parser("evaluate", help="evaluate models on maths benchmarks; see hacpo evaluate --help")
    subparsers.add_parser("quickstart", help="two tiny agents learn arithmetic together, on a CPU, in minutes")
    add_serve(subparsers)
    add_report(subparsers)
    parsed = parser.parse_args(arguments)
    if extra and parsed.subcommand != "serve":
        parser.error("only `hacpo serve` takes further arguments after --")
    return parsed.run(parsed, extra)


def add_serve(subparsers) -> None:
    """Adds `hacpo serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="start one vLLM server for each agent, and stop them together",
        usage="hacpo serve --models A B [--ports 8000 8001] [--gpus 0 1] [...] [-- further arguments of the servers]",
    )
    parser.add_argument("--models", nargs="+", required=True, help="one for each agent")
    parser.add_argument("--ports", nargs="+", type=int, help="one for each model; by default 8000, 8001, ...")
    parser.add_argument(
        "--gpus", nargs="+", help="one for each model, '0', or '0,1' to split it over them; by default 0, 1, ..."
    )
    parser.add_argument("--host", default="0.0.0.0", help="where the servers listen")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first server's sampling; the others get the numbers behind it"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until all servers must answer")
    parser.add_argument("--log_dir", help="where the servers' logs go; by default a new temporary folder")
    parser.set_defaults(run=_serve)


def add_report(subparsers) -> None:
    """Adds `hacpo report`."""
    parser = subparsers.add_parser("report", help="make one HTML page about a run")
    parser.add_argument("run_dir", help="the run's output_dir")
    parser.add_argument("--output", help="where the page goes; by default RUN_DIR/report.html")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace, extra: list[str]) -> int:
    from ..reporting.run_page import write_page

    try:
        print(write_page(parsed.run_dir, parsed.output))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError as error:
        remedy = "" if "pip install" in str(error) else ": pip install matplotlib pandas"
        print(f"hacpo report: error: {error}{remedy}.", file=sys.stderr)
        return 2
    return 0


def _serve(parsed: argparse.Namespace, extra: list[str]) -> int:
    from ..hub.origin import missing_folder

    for model in parsed.models:
        if (reason := missing_folder(model)) is not None:
            print(f"hacpo serve: error: {model}: {reason}.", file=sys.stderr)
            return 2
    return vllm_servers.run(
        parsed.models,
        ports=parsed.ports,
        gpus=parsed.gpus,
        host=parsed.host,
        seed=parsed.seed,
        extra=extra,
        timeout=parsed.timeout,
        log_dir=parsed.log_dir,
    )
