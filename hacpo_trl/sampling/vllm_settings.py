"""Which vLLM server or engine each agent of a team has, and which teams cannot have theirs. Needs no vLLM."""

from typing import Any
from urllib.parse import urlsplit

_ENGINE_FIELDS = ("vllm_enable_sleep_mode", "vllm_tensor_parallel_size")
_SERVER_FIELDS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port")


def check_servers(settings: Any, names: list[str]) -> None:
    """Refuses teams whose agents would overwrite each other's weights, or wait for each other for ever.

    Args:
        settings: of the team, a `HACPOConfig`.
        names: of the agents.

    Raises:
        ValueError: naming the agents, and what works.
    """
    servers: dict[str, str] = {}
    group_ports: dict[int, str] = {}
    engines: dict[str, dict[str, Any]] = {}  # settings of agents with an engine in the trainer's process
    for i, name in enumerate(names):
        own = {key: getattr(settings, key) for key in ("use_vllm", "vllm_mode", *_ENGINE_FIELDS, *_SERVER_FIELDS)}
        own.update(server_of(settings, name, i))
        own.update({key: value for key, value in (settings.agent_overrides or {}).get(name, {}).items() if key in own})
        if not own["use_vllm"]:
            continue
        if own["vllm_mode"] == "colocate":
            engines[name] = own
            continue
        url = own["vllm_server_base_url"] or f"http://{own['vllm_server_host']}:{own['vllm_server_port']}"
        other = servers.setdefault(_same_address(url), name)
        if other != name:
            raise ValueError(
                f"agents {other!r} and {name!r} would both use the vLLM server {url}, but a server holds the "
                "weights of one agent. Start one for each (hacpo serve --models ... --ports 8000 8001 starts them "
                "all) and set vllm_server_urls=['http://localhost:8000', 'http://localhost:8001', ...]."
            )
        port = own["vllm_group_port"]
        other = group_ports.setdefault(int(port), name)
        if other != name:
            raise ValueError(
                f"agents {other!r} and {name!r} would both sync their weights on vllm_group_port={port}. Give "
                "each a free port of its own in agent_overrides, or none: then they are vllm_group_port plus the "
                "agent's place in the team."
            )
    _check_engines(engines)


def _check_engines(engines: dict[str, dict[str, Any]]) -> None:
    if len(engines) < 2:
        return
    start = f"agents {', '.join(map(repr, engines))} would each have a vLLM engine in the trainer's process with "
    servers = "Use one server for each agent (vllm_mode='server' and vllm_server_urls), or "
    if any(own["vllm_enable_sleep_mode"] for own in engines.values()):
        raise ValueError(
            f"{start}vllm_enable_sleep_mode=True, but vLLM can put one engine a process to sleep. {servers}"
            "engines that stay awake (vllm_enable_sleep_mode=False, and a vllm_gpu_memory_utilization that fits "
            "them all)."
        )
    if any(int(own["vllm_tensor_parallel_size"]) > 1 for own in engines.values()):
        raise ValueError(
            f"{start}vllm_tensor_parallel_size > 1, but vLLM's groups of processes are one set a process, and "
            f"TRL makes new ones for every engine. {servers}vllm_tensor_parallel_size=1."
        )


def server_of(settings: Any, name: str, index: int) -> dict[str, Any]:
    """An agent's server, unless its overrides say otherwise."""
    overrides = (settings.agent_overrides or {}).get(name, {})
    server: dict[str, Any] = {"vllm_server_urls": None}
    addressed = {"vllm_server_base_url", "vllm_server_host", "vllm_server_port"} & overrides.keys()
    if settings.vllm_server_urls is not None and not addressed:
        server["vllm_server_base_url"] = settings.vllm_server_urls[index]
    elif addressed and "vllm_server_base_url" not in overrides:
        server["vllm_server_base_url"] = None  # TRL would prefer the team's address to the agent's port
    server["vllm_group_port"] = settings.vllm_group_port + index
    return server


def _same_address(url: str) -> str:
    """What two ways to write one server's address have in common."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    host = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::1", "::") else host
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}{parts.path.rstrip('/')}"
