"""From a target to a folder of training data: prompts, answers and features, resumable.

A round writes user turns with the target itself, draws tasks, lets the target answer both, and then
answers tasks about those answers. Rounds follow until the wanted number of answer tokens is there.
Each round is a function of the seed and its number, and a finished one is not written again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from outrider.core.sampling import SamplingParams
from outrider.engine.budget import FixedBudget
from outrider.engine.engine import Engine, EngineConfig
from outrider.errors import InvalidParameter
from outrider.models.target import Target
from outrider.models.tokenizer import Tokenizer
from outrider.train.features import FeatureStore, Recorder
from outrider.train.prompts import TrainPrompt, Writer, make_prompt, unique
from outrider.train.samples import (
    AnswerConfig,
    Sample,
    answer_all,
    append_samples,
    mend,
    read_samples,
)

RECORDER = "recorder"


@dataclass(frozen=True)
class DataConfig:
    """How much data, and of what.

    Attributes:
        tokens: answer tokens wanted.
        own_turns, tasks, texts: prompts of each well per round.
        answers: how the target answers.
        slots: sequences that are generated at once.
        seed: of everything.
    """

    tokens: int = 2_000_000
    own_turns: int = 300
    tasks: int = 300
    texts: int = 300
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    slots: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """Attributes:
    tokens: answer tokens so far, of `wanted`.
    per_second: answer tokens per second of this run.
    """

    tokens: int
    wanted: int
    per_second: float
    samples: int


@dataclass
class TrainingData:
    """A folder of samples, with features for all of them.

    Attributes:
        samples: all, in the order they were written.
        store: their features.
    """

    folder: Path
    samples: list[Sample]
    store: FeatureStore

    @classmethod
    def open(cls, folder: Path, *, features: tuple[int, ...], width: int) -> TrainingData:
        """What a folder holds; an empty one is fine."""
        folder.mkdir(parents=True, exist_ok=True)
        store = FeatureStore(folder / "features", features=features, width=width)
        path = folder / "samples.jsonl"
        mend(path)
        samples = [s for s in read_samples(path) if s.id in store]
        return cls(folder, samples, store)

    def split(self, held_out: bool) -> list[Sample]:
        """The samples to train on, or those that are held out."""
        return [s for s in self.samples if s.held_out is held_out]

    @property
    def answer_tokens(self) -> int:
        return sum(len(s.answer) for s in self.samples)

    def add(self, sample: Sample, features: object) -> None:
        """Keep a sample: features first, so that a listed sample always has them."""
        self.store.add(sample.id, features)  # type: ignore[arg-type]
        append_samples(self.folder / "samples.jsonl", [sample])
        self.samples.append(sample)


def empty_user_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The chat template up to where a user begins to write.

    Raises:
        InvalidParameter: the template has no such place.
    """
    ids = tokenizer.chat([{"role": "user", "content": ""}], add_generation_prompt=False)
    ends = [i for i, token in enumerate(ids) if token in tokenizer.end_tokens]
    if not ends:
        raise InvalidParameter(
            "this model's chat template does not end a turn with an end token, so it cannot write "
            "prompts itself; give a file of prompts"
        )
    return tuple(ids[: ends[-1]])


def own_turns(engine: Engine, tokenizer: Tokenizer, *, count: int, seed: int) -> list[TrainPrompt]:
    """User turns that the target writes itself."""
    start = empty_user_turn(tokenizer)
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        params = SamplingParams(
            temperature=draw.choice((0.8, 1.0, 1.0)),
            top_p=0.95,
            max_tokens=draw.choice((48, 96, 160)),
            seed=draw.getrandbits(63),
        )
        requests.append(engine.add(start, params))
    while engine.has_work:
        engine.step()
    prompts = []
    for request in requests:
        answer = engine.take(request)
        text = tokenizer.decode(answer.tokens).strip()
        if len(text) >= 8:
            prompts.append(make_prompt("own", [{"role": "user", "content": text}]))
    return prompts


def follow_ups(
    samples: Sequence[Sample], tokenizer: Tokenizer, writer: Writer, *, count: int, seed: int
) -> list[TrainPrompt]:
    """Tasks about answers of earlier samples: three of four about the text, one the next turn."""
    draw = random.Random(seed)
    usable = [s for s in samples if 24 <= len(s.answer) <= 200]
    prompts = []
    for sample in draw.sample(usable, min(count, len(usable))):
        text = tokenizer.decode(sample.answer).strip()
        prompts.append(writer.about(text))
    return prompts


def prepare(
    target: Target,
    tokenizer: Tokenizer,
    folder: Path,
    config: DataConfig,
    *,
    features: tuple[int, ...],
    width: int,
    prompts: Sequence[TrainPrompt] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TrainingData:
    """Write training data until there is enough, or until ``prompts`` are all answered.

    Args:
        folder: goes on with what is there.
        features, width: which hidden states to keep, and their size.
        prompts: a user's; `None` lets the target and the built-in tasks write them.
    """
    data = TrainingData.open(folder, features=features, width=width)
    seen = {sample.id for sample in data.samples}
    recorder = Recorder(features)
    answers = config.answers
    engine = Engine(
        target,
        drafters={RECORDER: recorder},
        config=EngineConfig(
            slots=config.slots,
            context=min(target.context_length, answers.max_prompt + answers.max_tokens),
            prefill_chunk=512,
            max_nodes=0,
            max_depth=0,
        ),
        budget=FixedBudget(nodes=0, depth=0),
        tokenizer=None,
    )
    start_tokens = data.answer_tokens

    def keep(sample: Sample) -> None:
        data.add(sample, recorder.take(sample.tokens))
        seen.add(sample.id)

    def answer(found: Sequence[TrainPrompt]) -> None:
        fresh = [p for p in unique(found) if p.id not in seen]

        def report(done: int, tokens: int, seconds: float) -> None:
            if progress is not None:
                total = data.answer_tokens
                progress(Progress(total, config.tokens, tokens / seconds, len(data.samples)))

        answer_all(engine, tokenizer, fresh, answers, sink=keep, drafter=RECORDER, progress=report)

    if prompts is not None:
        answer(prompts)
        return data
    number = _finished_rounds(folder)
    while data.answer_tokens < config.tokens:
        seed = config.seed * 1_000_003 + number
        writer, before = Writer(seed), len(data.samples)
        first = own_turns(engine, tokenizer, count=config.own_turns, seed=seed)
        first += [writer.task() for _ in range(config.tasks)]
        random.Random(seed).shuffle(first)
        answer(first)
        answer(follow_ups(data.samples[before:], tokenizer, writer, count=config.texts, seed=seed))
        number += 1
        _note_round(folder, number, config)
        if len(data.samples) == before:
            raise InvalidParameter("a whole round brought no new prompt; raise the temperatures")
    assert data.answer_tokens >= start_tokens
    return data


def _finished_rounds(folder: Path) -> int:
    path = folder / "rounds.json"
    return int(json.loads(path.read_text())["rounds"]) if path.exists() else 0


def _note_round(folder: Path, number: int, config: DataConfig) -> None:
    path = folder / "rounds.json"
    path.write_text(json.dumps({"rounds": number, "config": asdict(config)}, indent=1))
