"""`hacpo serve`: starts, waits, stops and reports, with stand-ins that only answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.ports import free_ports

from hacpo_trl.cli import command as cli
from hacpo_trl.sampling.vllm_servers import ServerError, serve, vllm_command, watch

ROOT = Path(__file__).parents[2]


def answering(**options):
    """The command of a stand-in; options by model, such as {"b": ["--never"]}."""

    def command(model, host, port, tensor_parallel, seed, extra):
        name = Path(model).name
        return [
            sys.executable,
            str(ROOT / "tests" / "support" / "answering_process.py"),
            model,
            str(port),
            *extra,
            *options.get(name, []),
        ]

    return command


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pids, timeout=60):
    deadline = time.monotonic() + timeout
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def children(servers):
    return [server.process.pid for server in servers] + [
        int(Path(f"{server.model}.child").read_text()) for server in servers
    ]


@pytest.fixture
def models(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return list(map(str, folders))


def test_all_answer_inside_the_block_and_none_is_left_after_it(models, tmp_path):
    command = answering(b=["--ready-after", "1"])
    with serve(
        models, ports=free_ports(2), gpus=["3", "0,1"], host="127.0.0.1", command=command, log_dir=tmp_path / "logs"
    ) as servers:
        for server, model, gpus in zip(servers, models, ["3", "0,1"], strict=True):
            with urllib.request.urlopen(f"{server.url}/health") as response:
                answer = json.load(response)
            assert (answer["model"], answer["gpus"]) == (model, gpus)
            assert "stand-in" in server.log.read_text() and server.log.parent == tmp_path / "logs"
        pids = children(servers)
        assert len(pids) == 4 and all(map(is_running, pids))
    assert ends(pids)


def test_the_server_of_an_adapter_starts_with_its_base(models, tmp_path, capsys):
    def adapter(**settings):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return str(folder)

    given = [adapter(base_model_name_or_path=models[0])]
    with serve(given, ports=free_ports(1), host="127.0.0.1", command=answering()) as servers:
        with urllib.request.urlopen(f"{servers[0].url}/health") as response:
            assert json.load(response)["model"] == models[0]
        assert servers[0].model == given[0]
    said = capsys.readouterr().out
    assert (
        f"{given[0]} is an adapter: its server starts with its base, {models[0]}" in said and "merge_adapter" in said
    )
    for base, message in ((None, "names no base"), ("/gone/base", "its base '/gone/base' is not there")):
        with pytest.raises(ValueError, match=f"adapter' is an adapter, but .*{message}"):
            with serve([adapter(base_model_name_or_path=base)], ports=free_ports(1), command=answering()):
                pytest.fail("it started")


def test_an_error_in_the_block_stops_the_servers(models):
    with pytest.raises(ZeroDivisionError):
        with serve(models, ports=free_ports(2), host="127.0.0.1", command=answering()) as servers:
            pids = children(servers)
            raise ZeroDivisionError
    assert ends(pids)


def test_a_server_that_dies_before_it_answers_is_named(models):
    with pytest.raises(ServerError, match=r"(?s)the server of .*/b at http://127.*exit code 1.*no such model"):
        with serve(models, ports=free_ports(2), host="127.0.0.1", command=answering(b=["--never"])):
            pytest.fail("it did not start")
    first = Path(f"{models[0]}.child")
    assert not first.exists() or ends([int(first.read_text())])


def test_a_server_that_never_answers_is_named(models):
    with pytest.raises(ServerError, match="no answer within 1 seconds from .*/b at .*--timeout"):
        with serve(
            models, ports=free_ports(2), host="127.0.0.1", command=answering(b=["--ready-after", "600"]), timeout=1
        ):
            pytest.fail("it did not start")
    assert ends([int(Path(f"{model}.child").read_text()) for model in models if Path(f"{model}.child").exists()])


def test_a_server_that_dies_later_is_named_and_the_other_stopped(models):
    with pytest.raises(ServerError, match="the server of .*/a at .* has ended with exit code -9"):
        with serve(models, ports=free_ports(2), host="127.0.0.1", command=answering()) as servers:
            pids = children(servers)
            servers[0].process.kill()
            watch(servers, interval=0.05)
    assert ends(pids)  # the dead server's child, too


def test_what_ignores_the_polite_signal_is_ended_by_force(models, monkeypatch):
    stop = cli.vllm_servers._stop
    monkeypatch.setattr(cli.vllm_servers, "_stop", lambda servers: stop(servers, grace=0.5))
    with serve(models, ports=free_ports(2), host="127.0.0.1", command=answering(a=["--stubborn"])) as servers:
        pids = children(servers)
    assert ends(pids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ports": [8000]}, "1 ports for 2 models"),
        ({"gpus": ["0"]}, "1 gpus for 2 models"),
        ({"extra": ["--seed", "1"]}, "--seed behind -- gives all servers one seed"),
        ({"extra": ["--seed=1"]}, "--seed behind -- gives all servers one seed"),
        ({"ports": [8000, 8000]}, "port 8000 for a and b; every server needs a port of its own"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        with serve(["a", "b"], command=answering(), **settings):
            pytest.fail("it started")


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used"):
            with serve(["a"], ports=[port], host="127.0.0.1", command=answering()):
                pytest.fail("it started")


DRIVER = """
import sys
sys.path[:0] = [{here!r}, {tests!r}]
from test_serve import answering
from hacpo_trl.cli import command as cli
from hacpo_trl.sampling import vllm_servers
run = vllm_servers.run
vllm_servers.run = lambda *args, **kwargs: run(*args, **kwargs, command=answering())
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_takes_its_servers_along(models, number):
    arguments = ["serve", "--models", *models, "--ports", *map(str, free_ports(2)), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DRIVER.format(here=str(Path(__file__).parent), tests=str(ROOT / "tests")),
            *arguments,
            "--gpus",
            "0",
            "1",
            "--",
            "--sleep",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "--vllm_server_urls" in line:
            break
    assert any("--vllm_server_urls http://127.0.0.1:" in line for line in lines), lines
    pids = [int(Path(f"{model}.child").read_text()) for model in models]
    process.send_signal(number)
    process.stdout.read()
    code = process.wait(timeout=60)
    if number == signal.SIGKILL:  # then the kernel tells the servers, and what they started is theirs to end
        for line in lines[:2]:
            with pytest.raises(OSError):
                for _ in range(600):
                    urllib.request.urlopen(line.split(": ")[1].split(" on ")[0], timeout=5)
                    time.sleep(0.1)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    else:
        assert code == 128 + number
        assert ends(pids)


def test_the_command_fails_with_its_server(models, capsys, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    run = cli.vllm_servers.run
    monkeypatch.setattr(
        cli.vllm_servers,
        "run",
        lambda *args, **kwargs: run(*args, **kwargs, command=answering(b=["--die-after", "2"])),
    )
    try:
        arguments = ["serve", "--models", *models, "--ports", *map(str, free_ports(2)), "--host", "127.0.0.1"]
        assert cli.main(arguments) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "exit code 3" in capsys.readouterr().err
    assert ends([int(Path(f"{model}.child").read_text()) for model in models])


def test_the_command_of_a_server(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="vLLM is not installed here. From a clone .*pip install -e"):
        vllm_command("m", "0.0.0.0", 8000, 1, 0, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    command = vllm_command("m", "0.0.0.0", 8000, 2, 5, ["--max-model-len", "64"])
    assert command[1:] == (
        "-m trl.scripts.vllm_serve --model m --host 0.0.0.0 --port 8000 --tensor_parallel_size 2 --seed 5 "
        "--generation-config vllm --max-model-len 64"
    ).split(" ")


def test_every_server_gets_a_seed_of_its_own(models):
    seeds = []

    def command(model, host, port, tensor_parallel, seed, extra):
        seeds.append(seed)
        return answering()(model, host, port, tensor_parallel, seed, extra)

    with serve(models, ports=free_ports(2), host="127.0.0.1", seed=40, command=command):
        pass
    assert seeds == [40, 41]


@pytest.mark.parametrize(
    ("outer", "gpus", "expected"),
    [
        (None, ["6", "7"], ["6", "7"]),
        ("4,5,6", ["0", "1,2"], ["4", "5,6"]),
        ("GPU-aa, GPU-bb", ["1", "GPU-aa"], ["GPU-bb", "GPU-aa"]),
        ("", ["0", "1"], ["", ""]),  # no GPU at all
    ],
)
def test_gpus_are_counted_in_those_that_are_visible(models, monkeypatch, outer, gpus, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    seen = []
    with serve(models, ports=free_ports(2), gpus=gpus, host="127.0.0.1", command=answering()) as servers:
        for server in servers:
            with urllib.request.urlopen(f"{server.url}/health") as response:
                seen.append(json.load(response)["gpus"])
    assert seen == expected


def test_gpus_that_are_not_visible_are_refused(models, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    message = "GPU 6 is not visible here: CUDA_VISIBLE_DEVICES=4,5 leaves 2, counted from 0 to 1"
    with pytest.raises(ValueError, match=message):
        with serve(models, ports=free_ports(2), gpus=["6", "0"], host="127.0.0.1", command=answering()):
            pytest.fail("it started")
