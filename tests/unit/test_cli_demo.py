"""`outrider demo` on a fake model: it passes where both answers agree, and fails where not."""

from __future__ import annotations

from outrider.testing.fakes import TableTarget

DEMO = ("demo", "--target", "fake", "--max-tokens", "24")


def test_the_demo_passes_and_shows_its_table(cli):
    result = cli(*DEMO)
    assert result.code == 0, result.out + result.err
    for word in ("chat", "edit", "extract", "code", "agent", "speed-up", "acceptance"):
        assert word in result.out
    assert "tokens are the same with and without speculation" in result.out
    assert result.out.count("-- none") == result.out.count("-- suffix") == 5


def test_the_demo_fails_when_a_guess_changes_what_is_said(cli, fake_target):
    """A target whose rows depend on their neighbours: what the demo is there to notice."""

    class Neighbourly(TableTarget):
        def forward(self, segments, cache, *, features=()):
            given = super().forward(segments, cache, features=features)
            for segment, rows in zip(segments, given.logits, strict=True):
                if segment.tree is not None and len(segment.tree) > 1:
                    rows += rows.flip(1) * 2
            return given

    result = cli(*DEMO, target=fake_target(kind=Neighbourly))
    assert result.code == 1
    assert "DIFFERENT" in result.out and "output token" in result.out
    assert "tokens are the same" not in result.out


def test_the_demo_fails_when_the_target_does(cli, fake_target):
    class Broken(TableTarget):
        def forward(self, segments, cache, *, features=()):
            given = super().forward(segments, cache, features=features)
            for rows in given.logits:
                rows *= float("nan")
            return given

    result = cli(*DEMO, target=fake_target(kind=Broken))
    assert result.code == 1
    assert "FAILED" in result.out


def test_an_unknown_drafter_is_refused(cli):
    result = cli(*DEMO, "--drafter", "sufix")
    assert result.code == 2 and "did you mean suffix" in result.error_lines[0]
