"""outrider eval, sweep, report and collect as a user types them; the tutorial, step by step."""

from __future__ import annotations

import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outrider.evaluate.recommend import recommend
from outrider.evaluate.report_html import to_html
from outrider.evaluate.runs import Run
from outrider.evaluate.summary import summarise
from outrider.testing.mock_engine import MockSettings, mock_engine

ROOT = Path(__file__).resolve().parents[2]
LINES = "".join(
    json.dumps({"id": f"q{n}", "family": "ab"[n % 2], "prompt": f"say {n} times hello"}) + "\n"
    for n in range(6)
)
VOID = {"meta"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.jsonl").write_text(LINES)
    return tmp_path


class Checker(HTMLParser):
    """Are all elements closed, and does nothing come from elsewhere?"""

    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.outside += [v for k, v in attributes if k in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(path):
    page = path.read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.outside == []
    assert "<script" not in page and "http://" not in page.replace("http://127.0.0.1", "")
    assert "nan" not in re.sub(r"<[^>]*>", "", page).lower().replace("nanny", "")
    assert len(page) < 3 * 2**20 and "prefers-color-scheme:dark" in page
    return page


def test_eval_on_the_embedded_engine(cli, tiny):
    words = ("--set", "tiny.jsonl", "--out", "run", "--max-tokens", "24", "-c", "1,2")
    result = cli("eval", "fake", *words)
    assert result.code == 0, result.err
    run = Run.load("run")
    assert len(run.samples) == 12 and run.finished
    assert {s["setting"] for s in run.samples} == {"suffix"}
    assert all(s["told"]["verify_ms"] > 0 for s in run.samples)
    assert run.manifest.options["generator_limit"]["requests"] > 0
    page = check_page(tiny / "run" / "report.html")
    assert "tokens per target step" in page and "One request" in page
    again = cli("eval", "fake", *words)
    assert again.code == 3 and "exists already" in again.err
    other = cli("eval", "fake", *words, "--resume", "--seed", "5")
    assert other.code == 2 and "another plan" in other.err
    assert cli("eval", "fake", *words, "--resume").code == 0


def test_sweep_on_the_embedded_engine(cli, tiny):
    words = ("--set", "tiny.jsonl", "--max-tokens", "24", "-c", "1", "--method", "suffix,ngram")
    planned = cli("sweep", "fake", *words, "--tokens", "auto,3", "--dry-run")
    assert planned.code == 0 and not (tiny / "sweep").exists()
    assert "settings: baseline, suffix, suffix-k3, ngram, ngram-k3" in planned.out
    assert "5 cells x 6 prompts x 1 rounds = 30 requests" in planned.out
    result = cli("sweep", "fake", *words, "--tokens", "3", "--full")
    assert result.code == 0, result.err
    assert "suffix-k3" in result.out and "Traceback" not in result.err
    told = json.loads((tiny / "sweep" / "recommendation.json").read_text())
    assert {v["setting"] for v in told["verdicts"]} == {"suffix-k3", "ngram-k3"}
    assert all(v["same_outputs"] == [6, 6] for v in told["verdicts"])  # exact, with any drafter
    assert all(v["split"]["v"] > 0 for v in told["verdicts"])
    assert (tiny / "sweep" / "settings" / "outrider.yaml").exists()
    page = check_page(tiny / "sweep" / "report.html")
    for title in ("Speed-up", "Acceptance by position", "What a step costs", "All cells"):
        assert f"<h2>{title}</h2>" in page


def test_eval_of_a_server_counts_faults_in_its_exit_code(cli, tiny):
    with mock_engine(MockSettings(faults=frozenset({"every-third"}), step_ms=0.2)) as url:
        result = cli("eval", url, "--set", "tiny.jsonl", "--warm-up", "0", "--max-tokens", "8")
    assert result.code == 1 and "2 of 6 requests failed" in result.out
    assert "Read this first" in check_page(tiny / "run" / "report.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "http://127.0.0.1:1", "--set", "tiny.jsonl"), "cannot be reached"),
        (("eval", "fake", "--set", "none.jsonl"), "cannot be read"),
        (("eval", "fake", "--set", "empty.jsonl"), "holds no prompt"),
        (("eval", "fake", "--set", "bad.jsonl"), "line 2: not JSON"),
        (("eval", "fake", "--set", ","), "--set is empty"),
        (("eval", "fake", "--set", "tiny.jsonl", "-c", "0"), "--concurrency has 0"),
        (("eval", "fake", "--set", "tiny.jsonl", "-t", "warm"), "--temperature has 'warm'"),
        (("eval", "fake", "--set", "tiny.jsonl", "--rate", "2", "--shape", "x"), "--shape is 'x'"),
        (("eval", "fake", "--set", "tiny.jsonl", "--drafter", "sufix"), "did you mean suffix"),
        (("sweep", "http://127.0.0.1:1", "--set", "tiny.jsonl"), "give --launch COMMAND"),
        (("sweep", "fake", "--profiles", "a", "--set", "tiny.jsonl"), "of a running server"),
        (("sweep", "fake", "--method", "magic", "--set", "tiny.jsonl"), "method 'magic'"),
        (("sweep", "fake", "--vary", "x", "--set", "tiny.jsonl"), "write NAME=V1,V2"),
        (("sweep", "m", "--launch", "vllm serve", "--engine", "vllm"), "needs {port}"),
        (
            ("sweep", "m", "--launch", "s {port} {speculative}", "--engine", "sglang"),
            "SGLang has no method suffix",
        ),
        (("report", "nowhere"), "cannot be read"),
        (("collect", "nowhere.jsonl"), "cannot be read"),
        (("collect", "bad.jsonl", "--out", "x.jsonl"), "line 2: not JSON"),
        (("collect", "tiny.jsonl", "--out", "tiny.jsonl"), "exists already"),
        (("collect", "tiny.jsonl", "--out", "x.jsonl", "--pattern", "a"), "write NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_one_line(words, message, cli, tiny):
    Path("empty.jsonl").write_text("\n")
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{oops\n')
    result = cli(*words)
    assert result.code in (2, 3), result.err
    assert len(result.error_lines) == 1 and message in result.error_lines[0]


def test_bad_lines_are_skipped_only_when_asked_and_are_named(cli, tiny):
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{oops\n')
    result = cli("eval", "fake", "--set", "bad.jsonl", "--skip-bad-lines", "--max-tokens", "4")
    assert result.code == 0 and "bad.jsonl, line 2 is skipped: not JSON" in result.err


def test_an_interrupted_run_leaves_a_partial_report_and_goes_on(cli, tiny, monkeypatch):
    from outrider.evaluate import sweep as module

    real, seen = module.sample, []

    def interrupt(*args, **options):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(*args, **options)

    words = ("--set", "tiny.jsonl", "--max-tokens", "8", "--out", "run")
    with mock_engine(MockSettings(tokens=2, step_ms=0.2)) as url:
        monkeypatch.setattr(module, "sample", interrupt)
        result = cli("eval", url, *words)
        assert result.code == 130 and "--resume goes on" in result.err
        assert "PARTIAL" in check_page(tiny / "run" / "report.html")
        assert len(Run.load("run").samples) == 3
        monkeypatch.setattr(module, "sample", real)
        assert cli("eval", url, *words, "--resume").code == 0
    assert len(Run.load("run").samples) == 6 and Run.load("run").finished
    assert "PARTIAL" not in (tiny / "run" / "report.html").read_text()


def test_a_run_without_samples_still_makes_a_page(tiny):
    from outrider.evaluate.runs import RunWriter
    from outrider.records.manifest import run_manifest

    with RunWriter.create(tiny / "run", run_manifest(seed=None)):
        pass
    summary = summarise(Run.load("run"))
    assert "the run holds no sample" in summary.faults
    assert "Nothing was compared" in to_html(summary)
    assert recommend([], {}).setting is None


def test_hostile_names_stay_text(cli, tiny):
    line = {"id": "<script>x</script>", "family": "=cmd()|'<b>", "prompt": "hi"}
    Path("odd.jsonl").write_text(json.dumps(line) + "\n")
    result = cli("eval", "fake", "--set", "odd.jsonl", "--max-tokens", "4")
    assert result.code == 0
    check_page(tiny / "run" / "report.html")
    assert "'=cmd()" in (tiny / "run" / "samples.csv").read_text()


def test_the_tutorial_runs(cli, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "tutorials" / "from-no-idea-to-a-setting.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with open("requests.jsonl", "w") as file:
        for n in range(12):
            text = f"Where is order AB-12345{n}? I am C0000{n % 9}, write to me{n}@example.org"
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    with mock_engine(MockSettings(tokens=2, step_ms=0.5)) as url:
        for command in commands:
            command = command.replace("http://127.0.0.1:8123", url)
            command = command.replace("python -m", f"{sys.executable} -m")
            command = command.replace("{speculative}", "{speculative} --step-ms 1")
            program, *words = shlex.split(command)
            assert program == "outrider"
            result = cli(*words)
            assert result.code == 0, (command, result.out, result.err)
    assert "@example" not in Path("mine.jsonl").read_text()
    assert "customer-1" in Path("mine.jsonl").read_text()
    check_page(tmp_path / "tried" / "report.html")
    assert (tmp_path / "tried" / "recommendation.json").exists()
    assert "Settings that differ" in check_page(tmp_path / "tomorrow" / "report.html")


def test_profiles_of_our_own_server_take_turns(cli, tiny):
    from outrider.testing.serving import fake_service, running_server

    words = ("--set", "tiny.jsonl", "-c", "1", "--max-tokens", "32", "--full")
    with running_server(fake_service()) as url:
        result = cli("sweep", url, "--profiles", "fast", *words)
        assert result.code == 0, result.err
        wrong = cli("sweep", url, "--profiles", "slow", *words, "--out", "other")
        assert wrong.code == 3 and "has no model 'fake@slow'" in wrong.err
    run = Run.load("sweep")
    profiles = {s["setting"]: s["told"]["profile"] for s in run.samples}
    assert profiles == {"baseline": "baseline", "fast": "fast"}
    told = json.loads((tiny / "sweep" / "recommendation.json").read_text())
    assert told["verdicts"][0]["same_outputs"] == [6, 6]


def test_charts_escape_what_they_show():
    from outrider.evaluate import charts

    name = "<b>&'\""
    for chart in (
        charts.dots([charts.Dot(name, 1.0, 0.5, 1.5)], title=name),
        charts.lines({name: [(1, 1), (2, 3)]}, title=name, x_name=name, y_name=name),
        charts.heat({name: [0.5, None]}, title=name, columns=[name, "2"]),
        charts.stacks({name: {name: 1.0}}, title=name),
        charts.timeline([1.0, 2.0], [0, 3], title=name),
    ):
        assert "<b>" not in chart and "&lt;b&gt;" in chart
        Checker().feed(chart)
    assert charts.dots([], title="x") == charts.timeline([], None, title="x") == ""
