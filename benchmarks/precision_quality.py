"""What a precision of the weights costs in quality, against fp32 on the same text.

    python benchmarks/precision_quality.py --target smollm2-135m --json FILE

The text is that of the built-in workloads (written for this project, so no model was trained on
it): every conversation through the chat template, cut at --length tokens. Perplexity over all
tokens, mean Kullback-Leibler divergence of the next-token distributions from fp32's in nats, and
how often the likeliest token is the same. All rows are read from passes of 32 rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.evaluate.workloads import load_workload
from outrider.models.load import load_model
from outrider.models.target import Segment, Target
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

ROWS = 32


@dataclass
class Score:
    """Sums over rows."""

    rows: int = 0
    negative_log_likelihood: float = 0.0
    divergence: float = 0.0
    agreement: int = 0

    def add(self, logp_RV: Tensor, reference_RV: Tensor, next_R: Tensor) -> None:
        self.rows += len(next_R)
        self.negative_log_likelihood -= float(logp_RV.gather(1, next_R[:, None]).sum())
        self.divergence += float((reference_RV.exp() * (reference_RV - logp_RV)).sum())
        self.agreement += int((logp_RV.argmax(1) == reference_RV.argmax(1)).sum())

    def to_dict(self) -> dict[str, float]:
        return {
            "rows": self.rows,
            "perplexity": math.exp(self.negative_log_likelihood / self.rows),
            "mean_kl": self.divergence / self.rows,
            "top1_agreement": self.agreement / self.rows,
        }


@torch.inference_mode()
def log_probabilities(target: Target, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Log-probabilities [R, V] in fp32 after every token, some rows at a time."""
    cache = target.new_cache(slots=1, length=len(tokens))
    for start in range(0, len(tokens), ROWS):
        chain = DraftTree.chain(tokens[start : start + ROWS])
        logits = target.forward([Segment(0, (), chain)], cache).logits[0]
        cache.keep(0, range(len(chain)))
        yield torch.log_softmax(logits.float(), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit", type=int, default=None, help="prompts of the whole set")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.weights.split(",")
    reference = load_model(options.target, weights="fp32", kernels="torch")
    targets = {name: load_model(options.target, weights=name).target for name in names}
    manifest = run_manifest(
        seed=None,
        threads=torch.get_num_threads(),
        target=TargetIdentity(reference.target.name, reference.target.fingerprint, "fp32"),
        options={k: str(v) for k, v in vars(options).items()},
    )
    scores = {name: Score() for name in ("fp32", *names)}
    for prompt in load_workload("builtin:all", limit=options.limit):
        tokens = reference.tokenizer.chat(prompt.chat())[: options.length]
        expected = list(log_probabilities(reference.target, tokens))
        for name, score in scores.items():
            rows = expected if name == "fp32" else log_probabilities(targets[name], tokens)
            for index, (logp, truth) in enumerate(zip(rows, expected, strict=True)):
                following = torch.tensor(tokens[index * ROWS + 1 : (index + 1) * ROWS + 1])
                score.add(logp[: len(following)], truth[: len(following)], following)
    document = {
        "manifest": manifest.finish().to_dict(),
        "precisions": {name: score.to_dict() for name, score in scores.items()},
    }
    for name, score in scores.items():
        print(name, {key: round(value, 5) for key, value in score.to_dict().items()})
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
