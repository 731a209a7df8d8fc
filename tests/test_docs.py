"""README, CHANGELOG and docs/ say what the code does: links, code, settings, messages and metrics.

Conventions of the pages: a fenced block tagged "python" runs (those of a page one after the other, in one namespace);
code that is not to run is indented. "**Message** `...`" quotes the beginning of one of the package's errors or
warnings, with … where the code puts something in. The first column of the tables in docs/metrics.md names metrics.
"""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from support.fake_vllm_server import use_fake_servers
from support.tiny_teams import config, dataset, digit_reward, team
from trl import GRPOConfig, ModelConfig, TrlParser

from hacpo_trl import HACPOConfig, HACPOTrainer, MathVerifier, merge_adapter
from hacpo_trl.cli.train import ScriptArguments
from hacpo_trl.memory import estimate
from hacpo_trl.sampling.vllm_servers import serve

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_BY_A_BENCHMARK = {ROOT / "docs" / "results.md"}  # a link to it is fine before it is there
THEIRS = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
OWN = [f for f in dataclasses.fields(HACPOConfig) if f.name not in THEIRS or f.default != THEIRS[f.name]]

# Where arguments that the pages name are those of
CALLED = (HACPOTrainer, HACPOTrainer.create_model_card, MathVerifier, merge_adapter, serve, estimate)

# What is in backticks and looks like one of our names, but belongs to others
FOREIGN = set("""attention_dropout exclude gpu_memory_utilization log_metric zero_force_ds_cpu_optimizer""".split())

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(page):
    """The text without blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines, code = [], False
    for previous, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        code = line.startswith("    ") and (code or not previous.strip())
        lines.append("" if code else line)
    return "\n".join(lines)


def inline_code(page):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def anchors(page):
    """What a repository viewer makes of the headings."""
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(anchor)
    return found


def links(page):
    return re.findall(r"!?\[[^\]]*\]\(([^)]*)\)", re.sub(r"`[^`\n]*`", "", prose(page)))


@pages
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith("http"):
            assert re.fullmatch(r"https?://[\w.-]+\.[a-z]+(/[\w./~%-]*)?(\?\S+)?(#\S+)?", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        if not target.exists() and target in WRITTEN_BY_A_BENCHMARK:
            continue
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: the headings are {sorted(anchors(target))}"


def test_the_documentation_is_linked():
    assert "docs/README.md" in links(ROOT / "README.md")
    index = links(ROOT / "docs" / "README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or page.name in index, page.name


@pages
def test_no_paths_of_somebodys_machine(page):
    found = re.findall(r"(?<![\w.~:/<>])/(?:home|root|Users|tmp|work|mnt|data|opt|var)/\S*", page.read_text("utf-8"))
    assert not found


@pages
def test_lines_are_wrapped(page):
    for line in prose(page).splitlines():
        assert len(line) <= 125 or line.startswith("|") or page.parent == ROOT, line


@pages
def test_code_runs(page):
    namespace = {}
    for match in re.finditer(r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        if match[1] != "python":
            continue
        line = page.read_text(encoding="utf-8")[: match.start(2)].count("\n")
        exec(compile("\n" * line + match[2], str(page), "exec"), namespace)


def test_the_equations_have_an_example():
    assert (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").count("```python") >= 5


def test_functions_named_beside_their_file_are_in_it():
    page = ROOT / "docs" / "algorithm.md"
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    named = [(n, f) for names, f in re.findall(r"\[([\w, ]+)\]\(\.\./(hacpo_trl/[\w/]+\.py)\)", text)
             for n in re.split(r", | and ", names)]  # fmt: skip
    named += re.findall(r"`(?:\w+\.)?(\w+)`[^`.]* in \[\w+\.py\]\(\.\./(hacpo_trl/[\w/]+\.py)\)", text)
    assert len(named) >= 10
    for name, file in named:
        assert re.search(rf"(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8")), (name, file)


# -- settings ---------------------------------------------------------------------------------------------------------


def sources():
    files = [*ROOT.glob("hacpo_trl/**/*.py"), *ROOT.glob("examples/**/*.*"), ROOT / "setup.cfg"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@pages
def test_names_in_backticks_exist(page):
    settings = {f.name for args in (HACPOConfig, ScriptArguments, ModelConfig) for f in dataclasses.fields(args)}
    arguments = {name for f in CALLED for name in inspect.signature(f).parameters}
    words = set(re.findall(r"\w+", sources() + str(documented())))
    for code in inline_code(page):
        for name in re.findall(r"(?<![\w.-])([a-z]\w*)=(?![= ])", code):
            # gsm8k=test.jsonl is a benchmark and its file
            assert name in settings | arguments | {"gsm8k", "dtype"}, f"`{code}`: there is no setting {name}"
        if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", code):
            assert code in settings | arguments | words | FOREIGN, f"`{code}`: nothing in the package has this name"
        for option in re.findall(r"(?<!\S)--([a-z]\w+)", code.partition(" -- ")[0]):
            assert option in settings | words | FOREIGN, f"`{code}`: there is no option {option}"


def test_foreign_names_are_needed():
    used = {word for page in PAGES for code in inline_code(page) for word in re.findall(r"\w+", code)}
    assert used >= FOREIGN


@pytest.mark.parametrize("field", OWN, ids=lambda f: f.name)
def test_help_is_one_sentence_that_explains(field):
    text = field.metadata["help"]
    assert len(text) <= 110 and "\n" not in text
    assert re.fullmatch(r"[A-Z'].*\.", text), "a sentence starts with a capital or a value and ends with a full stop"
    assert not re.search(r"\. [A-Z]", text), "one sentence"
    said = {word.rstrip("s") for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 2}
    known = {word.rstrip("s") for word in field.name.split("_")} | {"one", "the", "and", "for"}
    assert len(said - known) >= 4, "it only repeats the name"
    for choice in field.metadata.get("choices") or ():
        assert repr(choice) in text, f"it does not name {choice}"


def test_the_command_line_shows_these_helps():
    parser = TrlParser((ScriptArguments, HACPOConfig, ModelConfig))
    shown = {option: action.help for action in parser._actions for option in action.option_strings}
    for field in OWN:
        assert shown[f"--{field.name}"] == field.metadata["help"]
    assert all(f.metadata.get("help") for f in dataclasses.fields(ScriptArguments))
    help_page = " ".join(parser.format_help().split())  # no stray % breaks it
    assert OWN[0].metadata["help"] in help_page


# -- messages ---------------------------------------------------------------------------------------------------------


def texts_in(source):
    """Every text of a module, with … where an f-string puts something in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_quoted_messages_are_in_the_code():
    ours = [text for file in ROOT.glob("hacpo_trl/**/*.py") for text in texts_in(file.read_text(encoding="utf-8"))]
    # "{start}vllm_..." and "agent {name}: {message}" begin with what another text says
    ours += [text.removeprefix("…") for text in ours]
    quoted = re.findall(r"^\*\*Message\*\* `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.M)
    assert len(quoted) >= 40
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.S)
        assert any(pattern.match(text) for text in ours), f"no message of the package begins with {message!r}"


def test_every_message_marker_has_its_form():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert text.count("\n**Message**") == len(re.findall(r"^\*\*Message\*\* `[^`]+`$", text, re.M))


# -- metrics ----------------------------------------------------------------------------------------------------------


def documented():
    """Names of metrics by heading of docs/metrics.md."""
    found, heading = {}, None
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| `"):
            found.setdefault(heading, set()).update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def names_of(history, agents, functions):
    """The logged names, with placeholders for agents and functions."""
    agent = "|".join(agents)
    names = set()
    for key in {key for entry in history for key in entry}:
        key = re.sub(rf"^pair/({agent})->({agent})/", "pair/<source>-><learner>/", key)
        key = re.sub(rf"^(eval_)?({agent})/", r"\1<agent>/", key)
        key = re.sub(rf"/rewards/({'|'.join(functions)})/", "/rewards/<function>/", key)
        names.add(key)
    return names


@pytest.fixture(scope="module")
def logged(agent_folders, tmp_path_factory):
    names, pair = set(), ["char", "bpe"]
    common = {"max_rounds": 1, "peer_clip_delta": 0.9}
    evaluation = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 4, "beta": 0.1}
    runs = {"hacpo": evaluation, "gspo": {"method": "gspo", "entropy_coef": 0.01, "peer_clip_delta": 0.2}}
    urls = [f"http://{name}:8000" for name in pair]
    runs["vllm"] = {"use_vllm": True, "vllm_mode": "server", "vllm_server_urls": urls}
    for run, settings in runs.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            if run == "vllm":
                use_fake_servers(monkeypatch, {name: agent_folders[name] for name in pair})
            args = config(tmp_path_factory.mktemp(run), **{**common, **settings})
            trainer = team(agent_folders, pair, args, eval_dataset=dataset(2) if run == "hacpo" else None)
            trainer.train()
        names |= names_of(trainer.state.log_history, pair, [digit_reward.__name__])
    return names


def test_every_logged_metric_is_explained(logged):
    explained = set().union(*documented().values())
    for name in logged:
        if name.startswith("eval_<agent>/"):
            name = name.removeprefix("eval_")
        assert name in explained, f"docs/metrics.md does not explain {name}"


def test_every_explained_metric_is_logged(logged):
    seldom = documented()["What Trainer adds"] | {"eval_<agent>/<metric>", "<agent>/aux_loss"}
    seldom |= {f"pair/<source>-><learner>/{name}" for name in ("taken", "admitted")}
    explained = set().union(*documented().values()) - seldom
    assert not explained - logged
