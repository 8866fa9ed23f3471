"""What a certificate tests: settings of the sampler, sizes, prompts. Data only, no engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.law import ALPHA, Setting
from outrider.errors import InvalidParameter
from outrider.evaluate.certify_law import EFFECT, tokens_for

LENGTH = 4  # output tokens per request: the fourth can follow a step that accepted two guesses
GUESSES = 2  # per step
_DF = 7  # of the test over all settings, see `certify_law.EDGES`


SETTINGS = (
    Setting("narrow: temperature 0.5, top-k 4", 0.5, top_k=4),
    Setting("nucleus: temperature 0.8, top-p 0.9", 0.8, top_p=0.9),
    Setting("wide: temperature 1.0, no truncation", 1.0),
    Setting("hot: temperature 1.4, top-k 20, top-p 0.95", 1.4, top_k=20, top_p=0.95),
)

# Text that repeats itself, so that drafters which look into the context have something to guess,
# and ends where several words may follow. Written for this purpose.
PROMPTS = (
    "red, green, blue, red, green, blue, red, green, blue, red, green,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on the",
    "for x in xs:\n    print(x)\nfor x in xs:\n    print(x)\nfor x in xs:\n   ",
    "Anna likes tea. Ben likes tea. Carl likes tea. Anna likes coffee. Ben likes",
)

# Prompts whose greedy answers are compared; some end in near-ties on purpose.
GREEDY_PROMPTS = (
    "Count from one to twenty in words: one, two, three,",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "Toss a coin. It shows heads or tails, each as likely as the other. It shows",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
    "Once there was a lighthouse keeper who wrote down every ship that passed. One night",
)


@dataclass(frozen=True)
class CertifyPlan:
    """How much is tested.

    Attributes:
        requests: sampled requests per setting, spread over the prompts.
        null_share: so many of them, relative, are answered without speculation as well.
        settings, prompts: see above.
        length, guesses: output tokens per request; guesses per step.
        alpha: false-alarm level of each test.
        effect: the total variation that the test over all settings must be able to find.
        greedy_tokens: length of the greedy answers; 0 leaves that part out.
        slots: requests that run at once.
        seed: of the first request; the n-th has seed + n.
        sequential: stop a setting as soon as the evidence against the engine suffices.
    """

    requests: int
    null_share: float = 0.25
    settings: tuple[Setting, ...] = SETTINGS
    prompts: tuple[str, ...] = PROMPTS
    length: int = LENGTH
    guesses: int = GUESSES
    alpha: float = ALPHA
    effect: float = EFFECT
    greedy_tokens: int = 48
    greedy_prompts: tuple[str, ...] = GREEDY_PROMPTS
    slots: int = 32
    seed: int = 1
    sequential: bool = False

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("length", 2), ("guesses", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise InvalidParameter(f"{name} is {getattr(self, name)}; use {least} or more")
        if not 0 < self.null_share <= 1:
            raise InvalidParameter(f"null_share is {self.null_share}; use a number in (0, 1]")
        if not self.settings or not self.prompts:
            raise InvalidParameter("a certificate needs at least one setting and one prompt")

    @property
    def null_requests(self) -> int:
        return max(1, round(self.requests * self.null_share))


def full(*, alpha: float = ALPHA, effect: float = EFFECT) -> int:
    """Requests per setting with which all settings together find ``effect`` with power 0.99."""
    return -(-tokens_for(effect, _DF, alpha=alpha) // (LENGTH * len(SETTINGS)))
