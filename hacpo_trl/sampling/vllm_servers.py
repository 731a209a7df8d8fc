"""Starts the vLLM servers of a team: one for each agent, watched, and stopped together.

    hacpo serve --models A B --ports 8000 8001 --gpus 0 1 -- --max-model-len 8192

or `with serve(["A", "B"], ports=[8000, 8001]) as servers: ...`. Needs only the standard library; vLLM runs in the
servers' own processes.
"""

import atexit
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_LINES = 20  # of a dead server's log in the error
_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """A server did not start, or died."""


@dataclass
class Server:
    """One agent's server.

    Attributes:
        model: what it serves.
        url: its address.
        log: the file with what it writes.
        process: its first process, leader of a group of its own.
    """

    model: str
    url: str
    log: Path
    process: subprocess.Popen

    def answers(self) -> bool:
        """Whether it is ready for requests."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def check(self) -> None:
        """Raises an error when the server has ended."""
        code = self.process.poll()
        if code is None:
            return
        lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        raise ServerError(
            f"the server of {self.model} at {self.url} has ended with exit code {code}. The end of {self.log}:\n"
            + "\n".join(f"    {line}" for line in lines)
        )


def vllm_command(model: str, host: str, port: int, tensor_parallel: int, seed: int, extra: Sequence[str]) -> list[str]:
    """The command of one server: TRL's, which turns on what the trainer needs (weight transfer, log-probabilities).

    Of the model's own generation configuration vLLM takes the end tokens alone then, and no limits or penalties.

    Raises:
        ServerError: without vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ServerError(
            "vLLM is not installed here. From a clone of hacpo_trl: pip install -e '.[vllm]'; elsewhere: "
            "pip install 'vllm>=0.31,<0.32' 'transformers>=5.17,<5.18'."
        )
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", model, "--host", host, "--port", str(port)]
    if tensor_parallel > 1:
        command += ["--tensor_parallel_size", str(tensor_parallel)]
    return [*command, "--seed", str(seed), "--generation-config", "vllm", *extra]


@contextlib.contextmanager
def serve(
    models: Sequence[str],
    *,
    ports: Sequence[int] | None = None,
    gpus: Sequence[str] | None = None,
    host: str = "0.0.0.0",
    seed: int = 0,
    extra: Sequence[str] = (),
    timeout: float = 900.0,
    log_dir: str | os.PathLike | None = None,
    command: Callable[..., list[str]] = vllm_command,
) -> Iterator[list[Server]]:
    """Starts servers, waits until all answer, and stops them at the end of the block, whatever ends it.

    Each server leads a process group of its own, which is stopped as a whole. On Linux the servers also end when this
    process is killed (or the thread that started them ends).

    Args:
        models: one per agent, as for `HACPOTrainer`. The server of an adapter's folder starts with the adapter's base:
            the trainer sends it the merged weights.
        ports: one per model, by default 8000, 8001, ...
        gpus: one per model, "0" or "0,1" (then the model is split over them); by default GPU 0 for the first, 1 for
            the second, ... Where CUDA_VISIBLE_DEVICES is set they are counted in it, as CUDA does.
        host: where the servers listen.
        seed: of the first server's sampling; the others get the numbers behind it. With one seed for all, agents that
            start from one model would give equal answers.
        extra: further arguments of every server, TRL's or vLLM's: "--max-model-len", "8192".
        timeout: seconds until all must answer.
        log_dir: where the servers' logs go, by default a new temporary folder.
        command: builds the command of a server from (model, host, port, number of GPUs, seed, extra).

    Yields:
        The servers; their `url`s are what `vllm_server_urls` takes.

    Raises:
        ValueError: for settings that do not fit together, and for an adapter without base.
        ServerError: when a server dies or does not answer in time; all others are stopped.
    """
    models = list(models)
    ports = [8000 + i for i in range(len(models))] if ports is None else [int(port) for port in ports]
    gpus = [str(i) for i in range(len(models))] if gpus is None else [str(gpu) for gpu in gpus]
    _check(models, ports, gpus, host, extra)
    gpus = [_visible_gpus(gpu) for gpu in gpus]
    served = [_whole_model(model) for model in models]
    folder = Path(tempfile.mkdtemp(prefix="hacpo_serve_") if log_dir is None else log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []

    def stop() -> None:
        _stop(servers)

    atexit.register(stop)  # for a generator that nobody closes
    try:
        for i, (model, port, gpu) in enumerate(zip(models, ports, gpus, strict=True)):
            arguments = command(served[i], host, port, len(gpu.split(",")), seed + i, list(extra))
            servers.append(_start(model, arguments, f"http://{_reachable(host)}:{port}", gpu, folder / f"{port}.log"))
        _wait_until_ready(servers, timeout)
        yield servers
    finally:
        stop()
        atexit.unregister(stop)


def watch(servers: Sequence[Server], interval: float = 1.0) -> None:
    """Watches servers until one of them ends.

    Raises:
        ServerError: naming it.
    """
    while True:
        for server in servers:
            server.check()
        time.sleep(interval)


def run(
    models: Sequence[str],
    *,
    ports: Sequence[int] | None,
    gpus: Sequence[str] | None,
    host: str,
    seed: int,
    extra: Sequence[str],
    timeout: float,
    log_dir: str | None,
    command: Callable[..., list[str]] = vllm_command,
) -> int:
    """The command `hacpo serve`: serves until a signal, or the end of a server, ends it. See `serve`.

    Returns:
        The exit code.
    """

    def end(number, frame):
        for signal_number in _SIGNALS:  # stopping takes a moment, which a second signal may not cut short
            signal.signal(signal_number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)
    try:
        settings = {"ports": ports, "gpus": gpus, "host": host, "seed": seed, "extra": extra, "timeout": timeout}
        with serve(models, **settings, log_dir=log_dir, command=command) as servers:
            print("All servers answer. For the trainer:", flush=True)
            urls = " ".join(server.url for server in servers)
            print(f"    --use_vllm --vllm_mode server --vllm_server_urls {urls}", flush=True)
            watch(servers)
    except (ServerError, ValueError) as error:
        print(f"hacpo serve: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _check(models: list[str], ports: list[int], gpus: list[str], host: str, extra: Sequence[str]) -> None:
    if not models:
        raise ValueError("no models to serve; give one for each agent: --models A B.")
    for name, values in (("ports", ports), ("gpus", gpus)):
        if len(values) != len(models):
            raise ValueError(f"{len(values)} {name} for {len(models)} models; give one for each model.")
    if any(argument.split("=")[0] == "--seed" for argument in extra):
        raise ValueError(
            "--seed behind -- gives all servers one seed, and agents that start from one model would give equal "
            "answers. Put it before --: the first server gets it, the others the numbers behind it."
        )
    for port in ports:
        others = [model for model, other in zip(models, ports, strict=True) if other == port]
        if len(others) > 1:
            raise ValueError(f"port {port} for {' and '.join(others)}; every server needs a port of its own.")
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_reachable(host), port))
            except OSError as error:
                raise ValueError(f"port {port} cannot be used: {error}. Is an older server still running?") from None


def _whole_model(model: str) -> str:
    """What a server can load: a model, or the base of an adapter."""
    settings = Path(model, "adapter_config.json")
    if not settings.is_file():
        return model
    base = json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or (os.path.isabs(base) and not os.path.isdir(base)):
        lacks = f"its base {base!r} is not there" if base else "its adapter_config.json names no base"
        raise ValueError(
            f"{model!r} is an adapter, but {lacks}. Write the base's id or folder into base_model_name_or_path of "
            f"{settings}."
        )
    print(
        f"{model} is an adapter: its server starts with its base, {base}, and gets the merged weights of the trainer. "
        "To serve it without a trainer make a whole model of it: hacpo_trl.merge_adapter.",
        flush=True,
    )
    return base


def _visible_gpus(gpus: str) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for GPUs that are counted in those that are visible here."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not outer:
        return gpus if outer is None else outer
    visible = [name.strip() for name in outer.split(",")]
    chosen = []
    for gpu in gpus.split(","):
        number = int(gpu) if gpu.strip().isdigit() else None
        if number is None and gpu not in visible or number is not None and number >= len(visible):
            raise ValueError(
                f"GPU {gpu} is not visible here: CUDA_VISIBLE_DEVICES={outer} leaves {len(visible)}, counted "
                f"from 0 to {len(visible) - 1}. Choose among these (--gpus), or unset the variable."
            )
        chosen.append(gpu if number is None else visible[number])
    return ",".join(chosen)


def _reachable(host: str) -> str:
    return "localhost" if host in ("0.0.0.0", "::", "") else host


def _start(model: str, arguments: list[str], url: str, gpus: str, log: Path) -> Server:
    with open(log, "wb") as file:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
            start_new_session=True,  # a group of its own: vLLM's workers end with it, and Ctrl-C reaches only us
            preexec_fn=_end_with_parent(),
        )
    print(f"{model}: {url} on GPU {gpus}, log in {log}", flush=True)
    return Server(model, url, log, process)


def _end_with_parent() -> Callable[[], None] | None:
    """What a child runs so that the kernel ends it when this process is gone, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(servers: list[Server], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = list(servers)
    while waiting:
        for server in servers:
            server.check()
        waiting = [server for server in waiting if not server.answers()]
        if waiting and time.monotonic() > deadline:
            late = ", ".join(f"{server.model} at {server.url} (log: {server.log})" for server in waiting)
            raise ServerError(f"no answer within {timeout:g} seconds from {late}. Give it longer: --timeout.")
        if waiting:
            time.sleep(0.2)


def _stop(servers: list[Server], grace: float = 15.0) -> None:
    """Ends the process groups: politely, then by force what is left of them."""
    for server in servers:
        _signal_group(server, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(_group_lives(server) for server in servers):
        time.sleep(0.05)
    for server in servers:
        _signal_group(server, signal.SIGKILL)
        server.process.wait()
    servers.clear()


def _group_lives(server: Server) -> bool:
    server.process.poll()  # reaps a process that has ended, which would count as living
    return _signal_group(server, 0)


def _signal_group(server: Server, number: int) -> bool:
    try:
        os.killpg(server.process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
