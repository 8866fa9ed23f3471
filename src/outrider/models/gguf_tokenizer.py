"""The tokenizer inside a GGUF file, converted to the files that a model folder holds.

transformers does the conversion but leaves one thing out for most byte-level vocabularies: how text
is split before merging, which the file only names. A wrong split still gives tokens, but not those
the model was trained on, so an unknown name is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.models.gguf_file import GgufModel

# Splits that transformers sets by itself from the name in the file.
_KNOWN_TO_TRANSFORMERS = ("llama3", "llama-v3", "llama-bpe", "tekken", "qwen2", "deepseek-r1-qwen")
# GPT-2's split, which is transformers' default for byte-level vocabularies.
_PLAIN = ("gpt-2",)
# GPT-2's split after every digit has been split off (StarCoder, SmolLM and relatives).
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")


def convert_tokenizer(model: GgufModel, folder: Path) -> None:
    """Write tokenizer.json, its config, the chat template and generation_config.json.

    Raises:
        ModelError: the file holds no tokenizer, or one that is not supported.
    """
    metadata, path = model.metadata, model.path
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelError(f"{path} holds no tokenizer; use a file that does")
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "gpt2" and split not in (*_KNOWN_TO_TRANSFORMERS, *_PLAIN, *_DIGITS_APART):
        raise ModelError(f"{path}: the text split {split!r} of its tokenizer is not supported")

    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path}: its tokenizer cannot be converted ({reason})") from None
    if kind == "gpt2" and split in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True),
            ]
        )
    tokenizer.save_pretrained(folder)
    ends = [
        metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    ]
    if ends:
        content = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
        (folder / "generation_config.json").write_text(json.dumps(content) + "\n")
