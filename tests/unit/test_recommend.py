"""The recommendation from made-up samples whose truth is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from outrider.backends.base import UnsupportedOption
from outrider.backends.settings import (
    Setting,
    engine_flags,
    llamacpp_flags,
    own_profile,
    sglang_flags,
    tensorrt_llm_config,
    vllm_config,
)
from outrider.errors import InvalidParameter
from outrider.evaluate.emit import LLAMACPP, OWN, SGLANG, TENSORRT_LLM, VLLM, files
from outrider.evaluate.recommend import recommend

PROMPTS = 40


def samples(
    setting, speed, *, load=1, temperature=0.0, tau=None, prompts=PROMPTS, seed=0, spread=0.1,
    families=("code", "chat"), gains=None, told=None,
):  # fmt: skip
    """One sample a prompt: 50 tokens at ``speed`` times the prompt's own plain pace."""
    own, noise = np.random.default_rng(1), np.random.default_rng([seed, len(setting), load])
    rows = []
    for n in range(prompts):
        pace = 10 * np.exp(own.normal(0, 0.5))  # ms per token, of the prompt
        family = families[n % len(families)]
        gain = speed * (gains or {}).get(family, 1.0) * np.exp(noise.normal(0, spread))
        tpot = pace / gain
        steps = round(50 / (tau or 1))
        rows.append(
            {
                "id": f"p{n}", "family": family, "repeat": 0, "setting": setting,
                "temperature": temperature, "load": f"c{load}", "concurrency": load,
                "completion_tokens": 50, "ttft_ms": 20.0, "tpot_ms": tpot,
                "e2e_ms": 20 + 49 * tpot, "error": None, "finish_reason": "length",
                "accepted": 50 - steps, "drafted": 4 * steps if tau else 0,
                "target_steps": steps, "output_sha256": f"h{n}", "told": told or {},
            }
        )  # fmt: skip
    return rows


SETTINGS = {s.name: s for s in (Setting("none"), Setting("ngram", 2), Setting("ngram", 4))}


def judge(*groups, settings=SETTINGS, seed=0, resamples=1000):
    rows = [row for group in groups for row in group]
    return recommend(rows, settings, seed=seed, resamples=resamples)


def test_the_faster_setting_wins_with_its_interval_and_cost():
    found = judge(
        samples("baseline", 1), samples("ngram-k2", 1.3, tau=1.8), samples("ngram-k4", 1.6, tau=2.5)
    )
    assert found.setting == SETTINGS["ngram-k4"] and found.pays
    [choice] = found.choices
    assert choice.speedup.interval.low < 1.57 < choice.speedup.interval.high
    best = next(v for v in found.verdicts if v.setting == "ngram-k4")
    assert best.tau == 2.5 and best.decode.value == pytest.approx(1.6, rel=0.05)
    assert best.cost == pytest.approx(2.5 / best.decode.value)
    # at the acceptance rate where tau equals the cost, nothing is gained
    rate = best.break_even_rate
    assert 1 + (best.tau - 1) * rate / best.acceptance_rate == pytest.approx(best.cost)
    assert found.headline().startswith("Use ngram-k4: 1.")


def test_nothing_is_recommended_where_nothing_surely_pays():
    slower = judge(samples("baseline", 1), samples("ngram-k4", 0.8, tau=1.3))
    assert slower.setting is None and slower.headline() == "Nothing pays here: use plain decoding."
    unsure = judge(samples("baseline", 1), samples("ngram-k4", 1.01, tau=1.3, spread=0.4))
    assert not unsure.pays and "nothing pays: the best, ngram-k4" in unsure.choices[0].reason
    few = judge(samples("baseline", 1, prompts=3), samples("ngram-k4", 3, prompts=3))
    assert few.verdicts[0].pays is None and "Too little was measured" in few.headline()
    assert list(files(slower, target="m")) == [OWN]
    assert yaml.safe_load(files(slower, target="m")[OWN]) == {"target": "m"}


def test_of_settings_that_are_alike_the_one_that_guesses_least_is_taken():
    alike = judge(
        samples("baseline", 1),
        samples("ngram-k2", 1.50, spread=0.01),
        samples("ngram-k4", 1.52, spread=0.01),
    )
    assert alike.setting.tokens == 2 and "1 more within 3%" in alike.choices[0].reason
    apart = judge(
        samples("baseline", 1),
        samples("ngram-k2", 1.40, spread=0.01),
        samples("ngram-k4", 1.52, spread=0.01),
    )
    assert apart.setting.tokens == 4


def test_two_sweeps_pick_settings_of_nearly_the_same_speed():
    speeds = {"ngram-k2": 1.45, "ngram-k4": 1.5}
    picked = set()
    for seed in range(6):
        found = judge(
            samples("baseline", 1, seed=100 + seed),
            *(samples(name, speed, seed=seed) for name, speed in speeds.items()),
            seed=seed,
        )
        picked.add(speeds[found.setting.name])
    assert max(picked) / min(picked) <= 1.04


def test_a_setting_that_is_no_better_is_rarely_called_better():
    wrong = 0
    for seed in range(40):
        found = judge(
            samples("baseline", 1, seed=1000 + seed, spread=0.2),
            samples("ngram-k2", 1, seed=seed, spread=0.2),
            samples("ngram-k4", 1, seed=500 + seed, spread=0.2),
            resamples=400,
        )
        wrong += found.pays
    assert wrong <= 4  # 2.5 % of false claims by design: 1 of 40


def test_the_crossover_lies_between_the_loads_around_it():
    groups = [samples("baseline", 1, load=c, spread=0.01) for c in (1, 4, 16)]
    groups += [
        samples("ngram-k4", s, load=c, spread=0.01) for c, s in ((1, 1.6), (4, 1.2), (16, 0.8))
    ]
    groups += [
        samples("ngram-k2", s, load=c, spread=0.01) for c, s in ((1, 1.4), (4, 1.3), (16, 0.9))
    ]
    found = judge(*groups)
    [crossover] = found.crossovers
    assert crossover.setting == "ngram-k4" and 4 < crossover.concurrency < 16
    assert [c.setting for c in found.choices] == ["ngram-k4", "ngram-k2", "baseline"]
    assert found.schedule == ((1, 1, 4), (2, 4, 2), (5, 16, 0))
    texts = files(found, target="org/model")
    config = json.loads(texts[VLLM].split("--speculative-config '")[1].rstrip("'\n"))
    assert config == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 4, 2], [5, 16, 0]],
    }
    told = yaml.safe_load(texts[TENSORRT_LLM])["speculative_config"]
    assert told == {
        "decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": {1: 4, 4: 2},
    }  # fmt: skip
    assert "--speculative-num-draft-tokens 5" in texts[SGLANG]
    assert "--spec-type ngram-simple" in texts[LLAMACPP]


def test_the_profile_is_one_that_our_server_takes(tmp_path):
    from outrider.serve.config import load_config

    found = judge(samples("baseline", 1), samples("ngram-k4", 1.6, tau=2.5))
    path = tmp_path / "outrider.yaml"
    path.write_text(files(found, target="smollm2-135m")[OWN])
    config = load_config(path)
    assert config.default == "ngram-k4"
    profile = config.profile("ngram-k4")
    assert (profile.drafter, profile.max_nodes, profile.max_depth) == ("ngram", 4, 4)


def test_families_show_who_wins_and_who_loses():
    found = judge(
        samples("baseline", 1),
        samples("ngram-k4", 1.3, gains={"code": 1.5, "chat": 0.6}, spread=0.02),
    )
    families = found.verdicts[0].families
    assert families["code"].value > 1.5 and families["chat"].value < 1
    assert not found.pays
    assert "by family: code" in found.to_text()
    assert "code would gain with a profile of their own" in found.to_text()


def test_costs_are_split_where_the_engine_tells_its_times():
    plain = {"draft_ms": 0.0, "verify_ms": 450.0, "host_ms": 50.0}  # 10 ms a step
    guess = {"draft_ms": 20.0, "verify_ms": 220.0, "host_ms": 60.0}  # 20 steps
    found = judge(
        samples("baseline", 1, told=plain, spread=0.01),
        samples("ngram-k4", 1.6, tau=2.5, told=guess, spread=0.01),
    )
    split = found.verdicts[0].split
    assert (split.v, split.d, split.o) == pytest.approx((1.1, 0.1, 0.3))
    assert split.expected == pytest.approx(2.5 / 1.5)


def test_faults_and_other_outputs_are_counted_and_not_compared():
    broken = samples("ngram-k4", 1.6, tau=2.5)
    broken[0]["error"] = "HTTP 500"
    broken[1]["output_sha256"] = "other"
    broken[2]["finish_reason"] = "cancelled"
    found = judge(samples("baseline", 1), broken)
    [verdict] = found.verdicts
    assert (verdict.failed, verdict.pairs) == (1, PROMPTS - 2)
    assert verdict.same_outputs == (PROMPTS - 3, PROMPTS - 2)
    assert any("1 greedy outputs differ" in note for note in found.notes)
    alone = judge(samples("ngram-k4", 1.6))
    assert alone.verdicts == () and "has no baseline" in alone.notes[0]


def test_each_engines_words():
    eagle = Setting("eagle3", 3, model="head")
    assert vllm_config(eagle)["num_speculative_tokens"] == 3
    assert sglang_flags(eagle)[-6:] == [
        *("--speculative-num-draft-tokens", "4", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1"),
    ]
    assert tensorrt_llm_config(eagle)["decoding_type"] == "Eagle3"
    assert llamacpp_flags(eagle)[-2:] == ["--spec-draft-n-max", "3"]
    assert Setting.from_dict(json.loads(json.dumps(eagle.to_dict()))) == eagle
    with pytest.raises(UnsupportedOption, match="chains only"):
        vllm_config(Setting("eagle3", 3, nodes=8, model="head"))
    for make in (sglang_flags, llamacpp_flags):
        with pytest.raises(UnsupportedOption, match="no method suffix"):
            make(Setting("suffix", 3))
    shipped = Setting("eagle3", 3)
    assert own_profile(shipped)["drafter"] == "eagle3"
    both = Setting("hybrid", model="suffix+eagle3")
    assert own_profile(both)["drafter"] == "hybrid:suffix+eagle3"
    assert both.name == "hybrid-suffix+eagle3"
    for make in (vllm_config, sglang_flags, tensorrt_llm_config, llamacpp_flags):
        with pytest.raises(UnsupportedOption, match="write eagle3=PATH"):
            make(shipped)
    for wrong in (("telepathy",), ("ngram", 0)):
        with pytest.raises(InvalidParameter):
            Setting(*wrong)


def test_only_engines_that_can_be_told_are_started_with_a_setting(tmp_path):
    with pytest.raises(UnsupportedOption, match="cannot be restarted"):
        engine_flags("auto", Setting("ngram", 3), folder=tmp_path)
    assert engine_flags("auto", Setting("none"), folder=tmp_path) == []
    flag, path = engine_flags("tensorrt_llm", Setting("ngram", 3), folder=tmp_path)
    assert flag == "--config"
    with open(path) as file:
        assert yaml.safe_load(file)["speculative_config"]["max_draft_len"] == 3


def test_a_baseline_that_drifts_is_told():
    later = [{**row, "repeat": 1} for row in samples("baseline", 0.8)]
    found = judge(samples("baseline", 1), later, samples("ngram-k4", 1.6, tau=2.0))
    assert any("took +2" in note and "round 2" in note for note in found.notes)
    steady = [{**row, "repeat": 1} for row in samples("baseline", 1)]
    assert judge(samples("baseline", 1), steady, samples("ngram-k4", 1.6, tau=2.0)).notes == ()


def test_a_step_that_seems_cheaper_than_a_plain_one_is_told():
    found = judge(samples("baseline", 1), samples("ngram-k4", 2.5, tau=1.5))
    assert any("cannot be cheaper" in note for note in found.notes)
    assert found.headline().endswith("Doubtful: see the notes.")
    assert found.verdicts[0].break_even_rate == 0.0
