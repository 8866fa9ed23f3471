"""Rules about the whole source tree that no single module's test can hold.

Every rule is a function from sources to a list of faults, so that each can be tested twice: once on
the real tree, where it must find nothing, and once on a planted fault, where it must find it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "outrider"

# Lower may not import higher; neighbours in a row may not import each other.
LAYERS = (
    {"records"},
    {"kernels", "core"},
    {"models"},
    {"drafters"},
    {"engine"},
    {"rollout", "backends"},
    {"serve", "evaluate", "train"},
    {"cli"},
    {"__main__"},
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
FREE = {"errors"}  # importable by all; imports nothing of ours
NO_TORCH = ("records", "rollout", "backends")  # backends/embedded.py excepted
EMBEDDED = "backends/embedded.py"

# Where the words below are not about turning a vocabulary's logits into tokens.
SAMPLING_HOME = "core/sampling.py"
SAMPLING_CALLS = {"softmax", "log_softmax", "multinomial", "argmax", "gumbel_softmax"}
SAMPLING_ALLOWED = {
    "core/noise.py": {"argmax"},  # over arrival times, in numpy
    "train/losses.py": {"log_softmax", "argmax"},  # losses and curves; nothing is sampled there
    "train/heads.py": {"softmax"},  # attention's, over keys
    "evaluate/statistics.py": {"multinomial"},  # counts of a bootstrap over clusters
    "evaluate/certify_law.py": {"multinomial"},  # simulated counts of groups, for the power
}
SOFTMAX_OVER_KEYS = "models/"  # attention's softmax runs over keys, not over a vocabulary

FORBIDDEN_WORDS = (
    r"base[ _-]model",
    r"assistant",
    r"proposer",
    r"speculator",
    r"bonus",
    r"recovered",
)
# Words of other people that must be written as they are: the chat protocols' name for the model's
# own turn and a key of Medusa's config, both quoted; the name of a checkpoint format.
FOREIGN = re.compile(
    r"""["'](?:assistant|base_model_name_or_path)["']|\bSpeculators\b|\bspeculators_\w+"""
    r"""|["'`]speculators["'`]|vllm-project/speculators"""
)
# Weights of other tools come as pickles; read as tensors alone, and here alone.
PICKLES_HOME = "models/heads/files.py"

PUBLIC = {
    "__version__",
    "Engine",
    "EngineConfig",
    "Completion",
    "Update",
    "SamplingParams",
    "load_model",
    "available_models",
    "Target",
    "build_drafter",
    "drafter_names",
    "Drafter",
    "Needs",
    "Commit",
    "SequenceView",
    "NodeBudget",
    "DraftTree",
    "StepRecord",
    "OutriderError",
}

Sources = dict[str, str]


def package_sources() -> Sources:
    """Path inside the package to text."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(text: str) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            yield module, node.lineno
            if module == "outrider":
                yield from ((f"outrider.{alias.name}", node.lineno) for alias in node.names)


def wrong_directions(sources: Sources) -> list[str]:
    """Imports that go up, or sideways between the packages of a row."""
    faults = []
    for path, text in sources.items():
        here = Path(path).parts[0].removesuffix(".py")
        for module, line in imports(text):
            parts = module.split(".")
            if parts[0] != "outrider" or len(parts) == 1 or here == "__init__":
                continue
            there = parts[1]
            if there in FREE or there == here or there == "__version__":
                continue
            allowed = there != "cli" if here == "testing" else _below(there, here)
            if not allowed:
                faults.append(f"{path}:{line} imports {module}")
    return faults


def _below(there: str, here: str) -> bool:
    if there == "testing":
        return False
    return here in RANK and there in RANK and RANK[there] < RANK[here]


def torch_imports(sources: Sources) -> list[str]:
    """Torch where records, rollout and the remote backends must run without it."""
    return [
        f"{path}:{line} imports {module}"
        for path, text in sources.items()
        if path.startswith(tuple(f"{name}/" for name in NO_TORCH)) and path != EMBEDDED
        for module, line in imports(text)
        if module.split(".")[0] == "torch"
    ]


def stray_sampling(sources: Sources) -> list[str]:
    """Calls that turn logits into probabilities or tokens outside the one place for it."""
    faults = []
    for path, text in sources.items():
        if path == SAMPLING_HOME:
            continue
        allowed = set(SAMPLING_ALLOWED.get(path, ()))
        if path.startswith(SOFTMAX_OVER_KEYS):
            allowed.add("softmax")
        for node in ast.walk(ast.parse(text)):
            name = _used_name(node)
            if name in SAMPLING_CALLS - allowed:
                faults.append(f"{path}:{getattr(node, 'lineno', 0)} uses {name}")
    return faults


def _used_name(node: ast.AST) -> str | None:
    """The name that an attribute or an import brings into use."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.split(".")[-1]
    return None


def unsafe_code(sources: Sources) -> list[str]:
    """Ways to run what a file says: pickle, eval, exec, code that comes with a checkpoint."""
    faults = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name) and called.id in {"eval", "exec"}:
                    faults.append(f"{path}:{line} calls {called.id}")
                if ast.unparse(called) == "torch.load" and not (
                    path == PICKLES_HOME and _weights_only(node)
                ):
                    faults.append(f"{path}:{line} calls torch.load")
            if (
                isinstance(node, ast.keyword)
                and node.arg == "trust_remote_code"
                and not (isinstance(node.value, ast.Constant) and node.value.value is False)
            ):
                faults.append(f"{path}:{node.value.lineno} sets trust_remote_code")
        faults += [
            f"{path}:{line} imports {module}"
            for module, line in imports(text)
            if module.split(".")[0] in {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
        ]
    return faults


def _weights_only(call: ast.Call) -> bool:
    """Does the call say so itself?"""
    return any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def forbidden_words(sources: Sources) -> list[str]:
    """Second names for ideas that have one."""
    pattern = re.compile("|".join(FORBIDDEN_WORDS), re.IGNORECASE)
    return [
        f"{path}:{number} says {found.group()!r}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for found in pattern.finditer(FOREIGN.sub("", line))
    ]


def machine_details(sources: Sources) -> list[str]:
    """Paths of one machine, and hosts of package registries."""
    # Written in pieces, so that this file does not name what it looks for.
    roots = ("tmp", "home", "root", "work", "opt", "Users", "mnt")
    path_like = rf"(?<![\w.~}}$/])/(?:{'|'.join(roots)})/[\w.]"
    hosts = "|".join(("py" + r"pi\.org", "pythonhosted" + r"\.org", r"npm" + r"js\.org"))
    index = "extra-" + "index-url|--" + "index-url|find-" + "links"
    pattern = re.compile(f"{path_like}|{hosts}|{index}")
    return [
        f"{path}:{number} names {found.group()!r}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for found in pattern.finditer(line)
    ]


def repository_texts() -> Sources:
    """Every text file of the repository, without the licence's fixed text."""
    skip = {".peers", ".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
    skip |= {".mypy_cache", ".ruff_cache", ".pytest_cache"}
    texts = {}
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT)
        if skip & set(inside.parts) or any(part.endswith(".egg-info") for part in inside.parts):
            continue
        if not path.is_file() or inside.name == "LICENSE":
            continue
        try:
            texts[inside.as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image or another binary file
    return texts


PACKAGE_RULES = (wrong_directions, torch_imports, stray_sampling, unsafe_code, forbidden_words)


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert rule(package_sources()) == []


def test_the_repository_names_no_machine():
    assert machine_details(repository_texts()) == []


PLANTED = [
    (wrong_directions, "core/new.py", "from outrider.models.cache import KVCache"),
    (wrong_directions, "core/new.py", "from outrider import engine"),
    (wrong_directions, "core/new.py", "def f():\n    import outrider.drafters.base"),
    (wrong_directions, "records/new.py", "from outrider.core.tree import DraftTree"),
    (wrong_directions, "rollout/new.py", "import outrider.backends.vllm"),
    (wrong_directions, "evaluate/new.py", "import outrider.serve"),
    (wrong_directions, "engine/new.py", "from outrider.testing.fakes import TableTarget"),
    (wrong_directions, "testing/new.py", "import outrider.cli.main"),
    (wrong_directions, "errors.py", "import outrider.core.tree"),
    (torch_imports, "records/new.py", "import torch"),
    (torch_imports, "backends/vllm.py", "def f():\n    from torch import nn"),
    (stray_sampling, "engine/new.py", "probs = logits.softmax(-1)"),
    (stray_sampling, "drafters/new.py", "import torch\ntorch.multinomial(p, 1)"),
    (stray_sampling, "drafters/new.py", "from torch.nn.functional import softmax"),
    (stray_sampling, "drafters/new.py", "pick = max_logits.argmax"),
    (stray_sampling, "models/new.py", "token = logits.argmax()"),
    (stray_sampling, "core/noise.py", "x.softmax(0)"),
    (unsafe_code, "models/new.py", "import pickle"),
    (unsafe_code, "models/new.py", "torch.load(path)"),
    (unsafe_code, "models/new.py", "torch.load(path, weights_only=True)"),
    (unsafe_code, PICKLES_HOME, "torch.load(path)"),
    (unsafe_code, PICKLES_HOME, "torch.load(path, weights_only=flag)"),
    (unsafe_code, "models/new.py", "eval(text)"),
    (unsafe_code, "models/new.py", "AutoTokenizer.from_pretrained(p, trust_remote_code=flag)"),
    (forbidden_words, "engine/new.py", "# the bonus token"),
    (forbidden_words, "engine/new.py", "class Proposer: pass"),
    (forbidden_words, "engine/new.py", "assistant_model = None"),
    (forbidden_words, "engine/new.py", "base_model_name_or_path = 1"),
    (forbidden_words, "engine/new.py", "# two speculators"),
    (machine_details, "Makefile", "cp /" + "home/me/model.gguf ."),
    (machine_details, "docs/a.md", "see /" + "tmp/x"),
    (machine_details, "Makefile", "pip install --" + "index-url x"),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    PLANTED,
    ids=[f"{r.__name__}-{i}" for i, (r, *_) in enumerate(PLANTED)],
)
def test_the_rule_finds_a_planted_fault(rule, path, text):
    assert rule({path: text}) != []


ALLOWED = [
    (wrong_directions, "engine/new.py", "from outrider.drafters.base import Commit"),
    (wrong_directions, "records/new.py", "from outrider.errors import OutriderError"),
    (wrong_directions, "testing/new.py", "from outrider.engine import Engine"),
    (wrong_directions, "cli/new.py", "from outrider import __version__"),
    (torch_imports, EMBEDDED, "import torch"),
    (stray_sampling, SAMPLING_HOME, "torch.softmax(x, dim=-1)"),
    (stray_sampling, "models/new.py", "weights = scores.softmax(-1)"),
    (unsafe_code, "models/new.py", "from_pretrained(p, trust_remote_code=False)"),
    (unsafe_code, PICKLES_HOME, "torch.load(path, weights_only=True)"),
    (forbidden_words, "cli/new.py", 'message = {"role": "assistant"}'),
    (forbidden_words, "models/new.py", 'raw["speculators_config"]  # of Speculators'),
    (machine_details, "docs/a.md", "see docs/tmp/x and https://example.com/home/x"),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    ALLOWED,
    ids=[f"{r.__name__}-{i}" for i, (r, *_) in enumerate(ALLOWED)],
)
def test_the_rule_lets_pass_what_is_right(rule, path, text):
    assert rule({path: text}) == []


def test_the_public_names():
    assert set(outrider.__all__) == PUBLIC
    assert set(dir(outrider)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name):
    assert getattr(outrider, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Draftee'"):
        outrider.Draftee  # noqa: B018


def _imported_without(code: str, absent: str) -> None:
    """Run ``code`` in a fresh interpreter where importing ``absent`` fails."""
    guard = f"import sys; sys.modules[{absent!r}] = None; "
    subprocess.run([sys.executable, "-c", guard + code], check=True, cwd=ROOT / "src")


def test_records_and_the_command_lines_help_need_no_torch():
    modules = [
        f"outrider.records.{path.stem}"
        for path in sorted((PACKAGE / "records").glob("*.py"))
        if path.stem != "__init__"
    ]
    code = f"import outrider, outrider.records, outrider.cli.main, {', '.join(modules)}"
    _imported_without(code, "torch")


def test_that_check_can_fail():
    with pytest.raises(subprocess.CalledProcessError):
        _imported_without("import outrider.core.tree", "torch")
