"""What happened in one step of one sequence. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One target pass as one sequence saw it.

    Attributes:
        request: the request's id.
        step: counts the engine's steps.
        drafter: who guessed; "none" for plain decoding.
        rule: walk, reject or block.
        precision: what the target's weights were held in.
        lossless: false only under a rule that changes the output law.
        proposed: nodes put to the target, root not counted.
        proposed_depth: depth of the deepest of them.
        offered: nodes the drafter offered before the budget cut the tree.
        accepted: accepted nodes (the next token is not counted).
        emitted: tokens the request received from this step, next token included; less than
            accepted + 1 where the output ended inside the accepted path.
        rows: rows of the whole pass, all sequences together.
        sequences: sequences in the pass.
        draft_ms, verify_ms, host_ms: the whole step's time in milliseconds: drafting, target
            forward, and everything else.
        reason: why nothing was guessed, where nothing was; otherwise empty.
    """

    request: int
    step: int
    drafter: str
    rule: str
    precision: str
    lossless: bool
    proposed: int
    proposed_depth: int
    offered: int
    accepted: int
    emitted: int
    rows: int
    sequences: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
