"""From evidence to verdict, document and page; and the verb's own words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.cli.certify import PARTS, check_parts
from outrider.core.law import Law
from outrider.errors import InvalidParameter
from outrider.evaluate.certify import (
    Distribution,
    Section,
    certificate,
    check_seal,
    judge_distribution,
    judge_features,
    judge_greedy,
    overall,
    skipped,
    to_html,
    to_markdown,
)
from outrider.evaluate.certify_law import Tally

LAW = Law(tuple(range(6)), (0.4, 0.25, 0.15, 0.1, 0.06, 0.04))


def tally(name: str, *, lean: float = 0.0, tokens: int = 2000) -> Tally:
    rng, found = np.random.default_rng(5), Tally(name)
    p = np.array(LAW.probabilities) * (1 - lean) + lean * np.eye(6)[0]
    for token in rng.choice(6, p=p, size=tokens):
        found.add(LAW, int(token))
    return found


def distribution(**changes: object) -> Distribution:
    good, bad = tally("good"), tally("bad", lean=0.3)
    values: dict[str, object] = {
        "settings": [("one", [good.test()])],
        "nulls": [tally("null").test()],
        "pooled": good,
        "sabotage": [bad.test()],
        "missing": (),
        "counts": {"drafted": 10},
        "requests": 500,
    }
    return Distribution(**{**values, **changes})  # type: ignore[arg-type]


def test_a_law_that_holds_passes_and_states_its_power():
    section = judge_distribution(distribution())
    assert section.verdict == "pass", section.reasons
    assert "weaker than a full certificate" in section.summary
    assert "power 0.99" in section.summary and section.details["false_alarm_at_most"] <= 1e-4
    assert section.details["power_simulated"] < 0.5  # 2,000 tokens do not find 0.02, and say so


BAD = tally("bad", lean=0.3)
FAULTS = [
    ({"settings": [("one", [BAD.test()])]}, "fail", "z = "),
    ({"pooled": BAD}, "fail", "z = "),
    ({"exact": True, "couplings": [
        {"different": 2, "compared": 50, "total_variation_at_most": 0.5}]}, "fail", "2 of 50"),
    ({"nulls": [BAD.test()]}, "inconclusive", "without speculation"),
    ({"missing": ("rejections",)}, "inconclusive", "no rejections"),
    ({"sabotage": [tally("s").test()]}, "inconclusive", "broken on purpose passed"),
    ({"settings": [("one", [Tally("empty").test()])]}, "inconclusive", "no setting"),
    ({"processes": [{"rejected": True}]}, "fail", "sequential"),
    ({"failures": ["HTTP 500", "HTTP 500"]}, "fail", "2 requests failed"),
    ({"pooled": BAD, "uncertain": "text alone"}, "inconclusive", "text alone"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "verdict", "words"), FAULTS)
def test_a_fault_is_no_pass(changes, verdict, words):
    section = judge_distribution(distribution(**changes))
    assert section.verdict == verdict
    assert any(words in reason for reason in section.reasons), section.reasons


def greedy_row(margin: float | None = None, *, accepted: int | None = 3) -> dict[str, object]:
    difference = None
    if margin is not None:
        difference = {
            "position": 4, "margin": margin, "tolerance": 0.2, "near_tie": margin <= 0.2,
        }  # fmt: skip
    return {"prompt": "Hi | there", "tokens": 9, "accepted": accepted, "difference": difference}


def test_greedy_near_ties_pass_and_other_differences_fail():
    assert judge_greedy([greedy_row(), greedy_row(0.1)]).verdict == "pass"
    wrong = judge_greedy([greedy_row(), greedy_row(0.9)])
    assert wrong.verdict == "fail" and "margin 0.900" in wrong.reasons[0]
    assert judge_greedy([greedy_row(0.9)], uncertain="text").verdict == "inconclusive"
    assert judge_greedy([]).verdict == "inconclusive"
    assert judge_greedy([greedy_row(accepted=0)]).verdict == "inconclusive"


def feature(outcome: str) -> dict[str, str]:
    return {"name": "min_p", "outcome": outcome, "detail": "seen"}


def test_a_refusal_passes_and_silence_fails():
    assert judge_features([feature("honoured"), feature("refused")]).verdict == "pass"
    assert judge_features([feature("honoured"), feature("ignored")]).verdict == "fail"
    assert judge_features([feature("unclear")]).verdict == "inconclusive"


def document(*sections: Section) -> dict[str, object]:
    found = sections or (judge_distribution(distribution()), judge_greedy([greedy_row()]))
    return certificate(
        {"engine": "e <b>", "drafter": "d", "notes": ["one", "two"]},
        {"alpha": 1e-6},
        found,
        at="2026-01-01T00:00:00Z",
    )


def test_the_seal_survives_json_and_breaks_with_any_change(tmp_path: Path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document()))
    loaded = json.loads(path.read_text())
    check_seal(loaded)
    loaded["verdict"] = "fail"
    with pytest.raises(InvalidParameter, match="changed afterwards"):
        check_seal(loaded)
    with pytest.raises(InvalidParameter, match="no certificate"):
        check_seal({"certificate": 1})


def test_verdicts_add_up():
    parts = [Section("a", "pass", ""), skipped("b", "left out"), Section("c", "fail", "")]
    assert overall(parts) == "fail" and overall(parts[:2]) == "pass"
    assert overall([skipped("b", "")]) == "inconclusive"


def test_the_pages_say_the_verdict_first_and_escape():
    page = to_html(document())
    assert page.index("PASS") < page.index("Evidence") and "e &lt;b&gt;" in page
    assert "<script" not in page and "http" not in page and len(page) < 60_000
    text = to_markdown(document(judge_greedy([greedy_row(0.9)])))
    assert text.startswith("# Certificate: FAIL") and "Hi \\| there" in text


def test_numbers_that_json_lacks_become_null():
    section = Section("x", "pass", "", details={"z": float("inf"), "list": [float("nan"), 1.0]})
    found = document(section)["sections"][0]["details"]  # type: ignore[index]
    assert found == {"z": None, "list": [None, 1.0]}
    json.dumps(found, allow_nan=False)


# -- the verb -----------------------------------------------------------------------------------


def test_the_verb_on_the_fake_model(cli, tmp_path):
    """The whole command: 60 requests prove little, so the verdict may be no more than that."""
    sealed, page = tmp_path / "c.json", tmp_path / "c.md"
    outcome = cli(
        *("certify", "--target", "fake", "--requests", "60", "--parts", "greedy,distribution"),
        *("--json", str(sealed), "--page", str(page)),
    )
    found = json.loads(sealed.read_text())
    check_seal(found)
    assert outcome.code == (found["verdict"] != "pass")
    assert found["verdict"] in ("pass", "inconclusive"), outcome.out
    assert [s["name"] for s in found["sections"]] == ["greedy", "distribution"]
    assert found["subject"]["drafter"] == "suffix" and len(found["subject"]["drafter_hash"]) == 64
    assert page.read_text() == outcome.out.replace("\r", "") or "# Certificate" in page.read_text()
    again = cli("certify", "--verify", str(sealed))
    assert again.code == outcome.code and "# Certificate" in again.out
    sealed.write_text(sealed.read_text().replace('"seed": 1', '"seed": 2'))
    assert cli("certify", "--verify", str(sealed)).code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--parts", "greedy,nonsense"), "--parts"),
        (("--parts", ","), "--parts"),
        (("--requests", "0"), "requests is 0"),
        (("--reference-url", "http://127.0.0.1:1"), "--reference-url goes with --url"),
        (("--drafter", "nobody"), "nobody"),
        (("--json", "no/such/folder/c.json"), "cannot be written"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
    ],
)
def test_wrong_requests_are_one_line(cli, words, told):
    outcome = cli("certify", "--target", "fake", *words)
    assert outcome.code in (2, 3) and told in outcome.err
    assert "Traceback" not in outcome.err


def test_parts_keep_their_order():
    assert check_parts("features,greedy") == ("greedy", "features")
    assert check_parts(",".join(PARTS)) == PARTS
