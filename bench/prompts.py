"""Prompts for real servers: a request's segments become token ids, or words where only text is taken.

The ids of a segment depend on its key and the run's seed alone, so requests that share a segment share
its tokens, and another seed shares nothing: every sweep point takes its own, and the prefix cache stays cold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.request import Request, SegmentKey

UNKNOWN_VOCAB = 30_000  # below the vocabulary of every current model
OUTPUT_PREFIX = "out:"

# Short common words; with a leading space most vocabularies hold each as a single token.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said
what up its about into than them can only other new some could time these two may then do first any my
now such like our over man me even most made after also did many before must through back years where
much your way well down should because each just those people how too little state good very make world
still own see men work long get here between both life being under never day same another know while
last might us great old year off come since against go came right used take three
"""
_WORDS = _TEXT.split()


def id_range(vocab_size: int | None) -> tuple[int, int]:
    """Lowest id and one above the highest that prompts may use.

    Special, reserved and byte tokens sit at the ends of a vocabulary (Llama 3: the last 256 of 128,256;
    Qwen 2.5: from 151,643; gpt-oss: from 199,998; Mistral Tekken: the first 1,000; Gemma 3: image marks
    from 255,999 of 262,144), so the first 1,000 (an eighth, if that is less) and the last 3 % stay unused.

    Raises:
        BadInput: the vocabulary has fewer than 16 tokens.
    """
    if vocab_size is None:
        return 1000, UNKNOWN_VOCAB
    if vocab_size < 16:
        raise BadInput("vocab_size", vocab_size, "must be at least 16 to make prompts from")
    return min(1000, vocab_size // 8), vocab_size - max(1, vocab_size * 3 // 100)


class PromptMaker:
    """Makes the prompts of one run.

    Args:
        seed: the run's; two runs whose prompts must not meet in a prefix cache need different ones.
        vocab_size: of the served model; None keeps to ids that every current model has.
        salt: sets prompts of the same seed apart, those of warm-ups for one.
        kept_segments: how many segments to remember, for prefixes that many requests share.
    """

    def __init__(
        self, seed: int, vocab_size: int | None = None, *, salt: str = "", kept_segments: int = 64
    ) -> None:
        self._seed = f"{seed}{salt}"
        self._low, self._high = id_range(vocab_size)
        self._kept_segments = kept_segments
        self._segments: OrderedDict[SegmentKey, NDArray[np.int64]] = OrderedDict()

    def _draw(self, key: SegmentKey, length: int, low: int, high: int) -> NDArray[np.int64]:
        digest = blake2b(f"{self._seed}/{type(key).__name__}/{key}".encode(), digest_size=16).digest()
        # Ids are drawn one by one, so a longer draw begins with the shorter one.
        return np.random.default_rng(int.from_bytes(digest)).integers(low, high, length, dtype=np.int64)

    def segment(self, key: SegmentKey, length: int) -> NDArray[np.int64]:
        """The first `length` ids of the sequence named `key`; shape (length,)."""
        known = self._segments.get(key)
        if known is None or len(known) < length:
            known = self._draw(key, length, self._low, self._high)
            self._segments[key] = known
            while len(self._segments) > self._kept_segments:
                self._segments.popitem(last=False)
        else:
            self._segments.move_to_end(key)
        return known[:length]

    def token_ids(self, request: Request, outputs: Mapping[str, Sequence[int]] | None = None) -> list[int]:
        """The prompt's ids; `request.prompt_len` of them.

        `outputs` holds what earlier requests really generated, for segments that quote them; what it
        lacks is made up like any other segment.
        """
        ids: list[int] = []
        for key, length in request.prompt:
            quoted: Sequence[int] = ()
            if outputs and isinstance(key, str) and key.startswith(OUTPUT_PREFIX):
                quoted = outputs.get(key.removeprefix(OUTPUT_PREFIX), ())[:length]
                ids.extend(quoted)
            if len(quoted) < length:
                ids.extend(self.segment(key, length)[len(quoted) :].tolist())
        return ids

    def text(self, request: Request, tokens_per_word: float = 1.0) -> str:
        """The prompt as words, `tokens_per_word` tokens each: only the server can count them exactly."""
        words: list[str] = []
        for key, length in request.prompt:
            picks = self._draw(key, max(1, round(length / tokens_per_word)), 0, len(_WORDS))
            words.extend(_WORDS[pick] for pick in picks)
        return " ".join(words)
