"""From the timed bytes of one streamed answer to what happened: tokens, times, class.

Reads answers of `/v1/completions` and `/v1/chat/completions` (vLLM, SGLang and whoever speaks the same
dialect) and of SGLang's `/generate`. Pure: no clock, no socket; times are the caller's, in seconds.

Rules that other clients got wrong, and that hold here:

* A token is a chunk with generated content of any channel (text, content, reasoning, refusal, tool
  calls), or a chunk whose running usage count grew. Role chunks, empty deltas and pings are none.
* Counts come from the server's usage. Without usage the number of chunks stands in, labelled so.
* Inter-token latencies exist only where the number of tokens in every chunk is known; otherwise the
  gaps between chunks are called chunk gaps.
* HTTP 200 proves nothing: an error inside the stream makes the request an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from bench.sse import Event, SseLineTooLong, SseParser

Status = Literal["ok", "empty", "server_error", "truncated", "timeout", "refused"]
End = Literal["eof", "reset", "timeout"]

_DONE = b"[DONE]"
_PLAIN_USAGE = 3  # keys of a usage count without details: prompt, completion, total
_FAILED_FINISH = frozenset({"error", "abort"})
_decoder = json.JSONDecoder()


def _decode(text: str) -> Any:
    """`json.loads`, faster for a text without white space around it."""
    try:
        value, end = _decoder.raw_decode(text)
    except ValueError:
        end = -1
    return value if end == len(text) else _decoder.decode(text)


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """What one answer amounted to; times are on the caller's clock [s], None is "did not happen".

    Attributes:
        status: "ok", "empty" (complete, but no token), "server_error", "truncated", "timeout", "refused".
        detail: the server's own message, or what went wrong; "" if nothing did.
        error_code: HTTP-like code of an error, where one was given.
        stream_open: first event that carries a choice, be it only a role.
        first_token, last_token: first and last token of any channel.
        first_answer: first token that is not reasoning.
        token_times, token_counts: per token-bearing chunk, its time and how many tokens it held; the counts
            are known only if `itl_source` is not None, and 0 where unknown.
        output_tokens: tokens generated; of a failed request, as far as it got.
        token_source: "server_usage"; "chunks" is an estimate (one token per chunk); None if no token came.
        itl_source: "usage_deltas"; "one_token_per_chunk" (as many chunks as tokens); None: `itls` is empty
            and only `chunk_gaps` is known.
        finish_reason, model: as the server gave them.
        warnings: "first_chunk_tokens>1", "missing_done", "invisible_tokens".
        text: what was generated, if asked to keep it.
        token_ids: generated ids where the server gave them, else ().
    """

    status: Status
    detail: str = ""
    error_code: int | None = None
    stream_open: float | None = None
    first_token: float | None = None
    first_answer: float | None = None
    last_token: float | None = None
    token_times: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()
    output_tokens: int = 0
    token_source: Literal["server_usage", "chunks"] | None = None
    itl_source: Literal["usage_deltas", "one_token_per_chunk"] | None = None
    reasoning_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    warnings: tuple[str, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        """Gaps between token-bearing chunks [s]; the wait for the first one is not among them."""
        times = self.token_times
        return tuple(b - a for a, b in pairwise(times))

    @property
    def itls(self) -> tuple[float, ...]:
        """Inter-token latencies [s]: `output_tokens - 1` of them, summing to last minus first token.

        Tokens that arrive in one chunk arrive together: the first takes the gap, the others 0.
        """
        if self.itl_source is None or not self.token_counts:
            return ()
        itls = [0.0] * (self.token_counts[0] - 1)
        for gap, count in zip(self.chunk_gaps, self.token_counts[1:], strict=True):
            itls.append(gap)
            itls.extend([0.0] * (count - 1))
        return tuple(itls)

    @property
    def tpot(self) -> float | None:
        """(last - first token) / (output_tokens - 1) [s]; None below two tokens."""
        if self.output_tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


class StreamReader:
    """Follows one answer as its bytes arrive: `feed` each read, `finish` at the end, once.

    Raises nothing on bad bytes: whatever the server does ends in a `StreamOutcome`.
    """

    def __init__(self, *, keep_text: bool = False) -> None:
        self._sse = SseParser()
        self._keep_text = keep_text
        self._text: list[str] = []
        self._ids: list[int] = []
        self._error: tuple[str, int | None] | None = None
        self._stream_open: float | None = None
        self._first_answer: float | None = None
        self._times: list[float] = []
        self._counts: list[int] = []  # the running count at each token time; -1 unknown
        self._last_choice: float | None = None
        self._running = 0  # the last running usage count
        self._total: int | None = None
        self._reasoning_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._finish_reason: str | None = None
        self._model: str | None = None
        self.done = False

    @property
    def failed(self) -> bool:
        """Whether the server has reported an error, or sent what cannot be read."""
        return self._error is not None

    @property
    def has_token(self) -> bool:
        """Whether a first token has been seen."""
        return bool(self._times)

    def feed(self, time: float, data: bytes) -> None:
        """Take bytes that arrived at `time` [s]."""
        try:
            events = self._sse.feed(data)
        except SseLineTooLong as error:
            self._fail(str(error))
            return
        for event in events:
            self._event(time, event)

    def _fail(self, message: str, code: int | None = None) -> None:
        if self._error is None:
            self._error = (message, code)

    def _event(self, time: float, event: Event) -> None:
        name, data = event
        if data == _DONE:
            self.done = True
            return
        try:
            body = _decode(data.decode())
        except (ValueError, RecursionError):  # the first covers UnicodeDecodeError and JSONDecodeError
            if name == "error":
                self._fail(data.decode("utf-8", "replace")[:500])
            elif name in ("", "message"):
                self._fail(f"an event that is not JSON: {data[:80]!r}")
            return
        if not isinstance(body, dict):
            self._fail(f"an event that is not a JSON object: {data[:80]!r}")
            return
        if name == "error" or body.get("error") or body.get("object") == "error":
            self._server_error(body)
            return
        if self._model is None:
            model = body.get("model")
            self._model = model if isinstance(model, str) else None
        try:
            if "meta_info" in body:
                self._native(time, body)
            else:
                self._openai(time, body)
        except (AttributeError, LookupError, TypeError, ValueError):
            # A value of another type than the dialect has: checking each would cost every token.
            self._fail(f"an event of an unknown shape: {data[:200]!r}")

    def _server_error(self, body: dict[str, Any]) -> None:
        error = body.get("error") or body
        if isinstance(error, dict):
            message = error.get("message") or json.dumps(error)
            code = error.get("code")
            self._fail(str(message)[:500], code if isinstance(code, int) else None)
        else:
            self._fail(str(error)[:500])

    def _openai(self, time: float, body: dict[str, Any]) -> None:
        choices = body.get("choices")
        usage = body.get("usage")
        running = self._usage(usage) if isinstance(usage, dict) else None
        if not choices:
            return
        if self._stream_open is None:
            self._stream_open = time
        visible = answer = bare_role = False
        for choice in choices:
            delta = choice.get("delta")
            if delta is None:
                said: Any = choice.get("text")
                thought: Any = None
            else:
                said = (
                    delta.get("content")
                    or delta.get("tool_calls")
                    or delta.get("function_call")
                    or delta.get("refusal")
                )
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                bare_role = "role" in delta
            if said:
                visible = answer = True
            elif thought:
                visible = True
            if self._keep_text and isinstance(said, str):
                self._text.append(said)
            ids = choice.get("token_ids")
            if ids:
                self._ids.extend(ids)
            reason = choice.get("finish_reason")
            if reason is not None:
                self._finish(reason)
        if running:
            is_token = running > self._running  # text without a new token is a late flush, not a token
        else:
            is_token, running = visible, None
        if is_token:
            self._token(time, running, is_answer=answer)
        elif not bare_role:
            self._last_choice = time

    def _native(self, time: float, body: dict[str, Any]) -> None:
        """One event of SGLang's `/generate`: text is cumulative unless the server streams increments."""
        meta = body["meta_info"]
        if self._stream_open is None:
            self._stream_open = time
        running = self._usage(meta)
        ids = body.get("output_ids")
        if ids and running is not None:
            if len(ids) >= running:  # cumulative: an increment is shorter, but for the first one
                self._ids = list(ids)
            else:
                self._ids.extend(ids)
        text = body.get("text")
        if self._keep_text and isinstance(text, str):
            cumulative = "".join(self._text)
            self._text = [text] if text.startswith(cumulative) else [cumulative, text]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            kind = str(reason.get("type"))
            if kind in _FAILED_FINISH:
                code = reason.get("status_code")
                message = str(reason.get("message") or f"finish reason {kind}")[:500]
                self._fail(message, int(code) if isinstance(code, int) else None)
            self._finish(kind)
        elif reason is not None:
            self._finish(reason)
        if running is None and text:
            self._token(time, None, is_answer=True)
        elif running is not None and running > self._running:
            self._token(time, running, is_answer=True)

    def _usage(self, usage: dict[str, Any]) -> int | None:
        """The running count of output tokens, noted along with all else that `usage` tells."""
        if len(usage) > _PLAIN_USAGE or self._prompt_tokens is None:
            self._details(usage)
        count = usage.get("completion_tokens")
        if type(count) is not int:
            return None
        self._total = count
        return count

    def _details(self, usage: dict[str, Any]) -> None:
        prompt = usage.get("prompt_tokens")
        if isinstance(prompt, int):
            self._prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cached_tokens")
        if isinstance(cached, int):
            self._cached_tokens = cached
        details = usage.get("completion_tokens_details")
        holder = details if isinstance(details, dict) else usage
        reasoning = holder.get("reasoning_tokens")
        if isinstance(reasoning, int):
            self._reasoning_tokens = reasoning

    def _finish(self, reason: object) -> None:
        self._finish_reason = str(reason)
        if self._finish_reason in _FAILED_FINISH:
            self._fail(f"finish reason {self._finish_reason}")

    def _token(self, time: float, running: int | None, *, is_answer: bool) -> None:
        self._times.append(time)
        if running is None:
            self._counts.append(-1)
        else:
            self._counts.append(running)
            self._running = max(self._running, running)
        if is_answer and self._first_answer is None:
            self._first_answer = time

    def finish(self, end: End, detail: str = "") -> StreamOutcome:
        """The outcome, given how the stream ended: "eof" (as HTTP has it complete), "reset", "timeout"."""
        times, warnings = self._times, []
        first_answer = self._first_answer
        if not times and self._total and self._last_choice is not None:
            # Tokens without any text (special tokens, say), and no running usage to date them by.
            times = [self._last_choice]
            self._counts = [-1]
            first_answer = self._last_choice
            warnings.append("invisible_tokens")
        is_complete = self.done or self._finish_reason is not None
        status: Status
        code = None
        if self._error is not None:
            status = "server_error"
            detail, code = self._error
        elif is_complete:
            status = "ok" if times else "empty"
        elif end == "timeout":
            status = "timeout"
        else:
            status = "truncated"
            detail = detail or "the stream ended without finish_reason and [DONE]"
        if status == "ok" and not self.done:
            warnings.append("missing_done")
        counts, itl_source = self._per_chunk(times)
        if counts and counts[0] > 1:
            warnings.append("first_chunk_tokens>1")
        output_tokens = self._total if self._total is not None else len(times)
        return StreamOutcome(
            status=status,
            detail=detail,
            error_code=code,
            stream_open=self._stream_open,
            first_token=times[0] if times else None,
            first_answer=first_answer,
            last_token=times[-1] if times else None,
            token_times=tuple(times),
            token_counts=counts if itl_source else (0,) * len(times),
            output_tokens=output_tokens,
            token_source="server_usage" if self._total is not None else "chunks" if times else None,
            itl_source=itl_source,
            reasoning_tokens=self._reasoning_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            finish_reason=self._finish_reason,
            model=self._model,
            warnings=tuple(warnings),
            text="".join(self._text),
            token_ids=tuple(self._ids),
        )

    def _per_chunk(
        self, times: list[float]
    ) -> tuple[tuple[int, ...], Literal["usage_deltas", "one_token_per_chunk"] | None]:
        """Tokens in every chunk, and how they are known; the two sources of the module's third rule."""
        if not times:
            return (), None
        running = self._counts
        if -1 not in running:
            counts = tuple(b - a for a, b in pairwise([0, *running]))
            # A final usage above the last running count would leave tokens without a time.
            if min(counts) >= 1 and running[-1] == self._total:
                return counts, "usage_deltas"
        if self._total is not None and self._total == len(times):
            return (1,) * len(times), "one_token_per_chunk"
        return (), None


def read_stream(
    reads: Iterable[tuple[float, bytes]], *, end: End = "eof", keep_text: bool = False
) -> StreamOutcome:
    """The outcome of a recorded answer: `reads` are (time [s], bytes) in order of arrival."""
    reader = StreamReader(keep_text=keep_text)
    for time, data in reads:
        reader.feed(time, data)
    return reader.finish(end)
