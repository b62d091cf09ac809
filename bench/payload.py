"""What to load and how to ask it: the server under test and the JSON bodies of its endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from sim.errors import BadInput

Dialect = Literal["completions", "chat", "generate"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one request [s]; a request that meets one is censored (at least this long), not lost.

    `first_token` runs from the send; `idle` is the longest silence, pings included, after the first token.
    """

    connect: float = 10.0
    first_token: float = 3600.0  # under a full load it is the time in the queue
    idle: float = 300.0
    total: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise BadInput(f"{name} timeout", value, "must be above 0 s")

    @classmethod
    def of_request(cls, total: float) -> Self:
        """A limit of so many seconds, to the first token and between tokens as to the last one [s]."""
        return cls(first_token=total, idle=total, total=total)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load.

    Attributes:
        base_url: as in "http://127.0.0.1:8000".
        model: the name that requests carry.
        endpoint: "/v1/completions", "/v1/chat/completions" or "/generate" (SGLang).
        api_key_env: the environment variable that holds the API key; only its name is ever kept.
        vocab_size: of the model, to make prompts from; None keeps to ids that every current model has.
        max_model_len: context limit [tokens], if known: what cannot fit is refused before the run.
        continuous_usage: ask for a running usage count in every chunk, without which there is no ITL.
        model_aliases: other names under which the server may answer for `model`.
        extra_body: more keys for every request body, such as `temperature`.
    """

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    api_key_env: str = "OPENAI_API_KEY"
    vocab_size: int | None = None
    max_model_len: int | None = None
    continuous_usage: bool = True
    model_aliases: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("--base-url", self.public_url, "must look like http://host:port")
        try:
            _ = parts.port
        except ValueError:
            raise BadInput("--base-url", self.public_url, "its port must be a number up to 65535") from None
        _ = self.dialect

    @property
    def url(self) -> str:
        """The full address of the endpoint."""
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def public_url(self) -> str:
        """`base_url` without user name, password, query: fit for results and messages."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def dialect(self) -> Dialect:
        """Which API the endpoint speaks.

        Raises:
            BadInput: none that is known here.
        """
        path = self.endpoint.rstrip("/")
        if path.endswith("/chat/completions"):
            return "chat"
        if path.endswith("/completions"):
            return "completions"
        if path.endswith("/generate"):
            return "generate"
        raise BadInput(
            "--endpoint", self.endpoint, "must end in /completions, /chat/completions or /generate (SGLang)"
        )

    @property
    def takes_token_ids(self) -> bool:
        """Whether prompts can be sent as token ids, so that their length is exact."""
        return self.dialect != "chat"


def request_body(
    target: Target,
    prompt: list[int] | str,
    max_tokens: int,
    *,
    ignore_eos: bool = True,
    want_token_ids: bool = False,
) -> bytes:
    """The JSON body of one streamed request.

    Sources: vLLM 0.28 `entrypoints/openai` protocol (`ignore_eos`, `return_token_ids`,
    `stream_options.continuous_usage_stats`); SGLang 0.5 `srt/managers/io_struct.py` `GenerateReqInput`.
    """
    body: dict[str, Any]
    if target.dialect == "generate":
        sampling: dict[str, Any] = {"max_new_tokens": max_tokens}
        if ignore_eos:
            sampling["ignore_eos"] = True
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "stream": True}
        extra = dict(target.extra_body)
        sampling.update(extra.pop("sampling_params", {}))
        body |= {"sampling_params": sampling, **extra}
        return json.dumps(body, separators=(",", ":")).encode()
    body = {"model": target.model}
    if target.dialect == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
        body["max_completion_tokens"] = max_tokens
    else:
        body["prompt"] = prompt
        body["max_tokens"] = max_tokens
    options: dict[str, Any] = {"include_usage": True}
    if target.continuous_usage:
        options["continuous_usage_stats"] = True
    body |= {"stream": True, "stream_options": options}
    if ignore_eos:
        body["ignore_eos"] = True
    if want_token_ids:
        body["return_token_ids"] = True
    body.update(target.extra_body)
    return json.dumps(body, separators=(",", ":")).encode()
