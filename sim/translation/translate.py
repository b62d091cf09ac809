"""The nearest command of the other engine, flag by flag, with what differs.

Same arguments do not make the same engine: each pair says whether it is equal, near (and what differs), or
without counterpart. Sources: the argument definitions of vLLM 0.28 and SGLang 0.5.21.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sim.commands.flags import GivenFlag, check_kind
from sim.commands.given import Given
from sim.commands.serve import ServeCommand, table
from sim.errors import BadInput
from sim.provenance import Note
from sim.scenario import EngineName
from sim.secrets import SECRET_NAME
from sim.translation.rules import BY_SGLANG, BY_VLLM, DEFAULTS, NO_SGLANG, NO_VLLM, Verdict

VLLM_BLOCK = 16
SGLANG_PREFILL_LIMIT = 16384
_OWN_ENV = re.compile(r"(VLLM|SGLANG|SGL)_")


@dataclass(frozen=True, slots=True)
class Pair:
    """One setting on both sides: as given, as written for the other engine ("" if nothing), and how alike."""

    source: str
    target: str
    verdict: Verdict
    text: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """A command for the other engine.

    Attributes:
        engine: the engine of `words`.
        words: the command as an argument list.
        pairs: every given flag, in order, then secrets that were left out, then the environment.
        defaults: settings that nobody wrote and whose defaults differ.
        env: variables that hold for any engine: those of the driver, of the libraries, of the model hub.
        notes: what was skipped or read leniently in the command that was given.
    """

    engine: EngineName
    words: tuple[str, ...]
    pairs: tuple[Pair, ...]
    defaults: tuple[Pair, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def command(self) -> str:
        """The command as one line for a shell."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, shlex.join(self.words)])


@dataclass(slots=True)
class _Draft:
    """A translation under way: what each given flag became, by name and dotted tail."""

    given: Given
    words: dict[str, list[list[str]]] = field(default_factory=dict)
    pairs: dict[str, Pair] = field(default_factory=dict)

    def put(self, source: GivenFlag, targets: list[list[str]], verdict: Verdict, text: str = "") -> None:
        """Record one flag's fate: it becomes `targets`, each a flag with its value."""
        shown = " ".join(shlex.join(target) for target in targets)
        self.words[_key(source)] = targets
        self.pairs[_key(source)] = Pair(_shown(source), shown, verdict, text)

    def in_order(self, flags: tuple[GivenFlag, ...]) -> list[str]:
        """All words in the order of the given flags; a flag that several ask for comes once."""
        seen: dict[str, list[str]] = {}
        for flag in flags:
            for target in self.words[_key(flag)]:
                seen.setdefault(target[0], target)
        return [word for target in seen.values() for word in target]


def translate(command: ServeCommand) -> Translation:
    """Write the nearest command of the other engine.

    Raises:
        BadInput: the command names no model, or a value is no such number.
    """
    if command.model is None:
        raise BadInput("--serve", None, "the command names no model")
    to_sglang = command.engine == "vllm"
    draft = _Draft(Given(command.given))
    for rule in _TO_SGLANG if to_sglang else _TO_VLLM:
        rule(draft)
    for item in command.given:
        if _key(item) not in draft.pairs:
            _translate_simple(draft, item, to_sglang)
    named = {item.flag.name for item in command.given}
    defaults = tuple(
        Pair(f"({mine} at its default)", "", "near", text)
        for vllm, sglang, text in DEFAULTS
        if (mine := vllm if to_sglang else sglang) not in named
    )
    start = (
        ["python", "-m", "sglang.launch_server", "--model-path", command.model]
        if to_sglang
        else ["vllm", "serve", command.model]
    )
    pairs = tuple(draft.pairs[_key(item)] for item in command.given)
    secrets = tuple(note.subject for note in command.notes if note.text.startswith("a secret"))
    pairs += tuple(Pair(name, "", "none", "a secret: set it again") for name in secrets)
    env = {name: value for name, value in command.env.items() if not _left_behind(name)}
    return Translation(
        "sglang" if to_sglang else "vllm",
        (*start, *draft.in_order(command.given)),
        pairs + tuple(_env_pair(name, value) for name, value in command.env.items()),
        defaults,
        env,
        tuple(note for note in command.notes if note.subject not in secrets),
    )


def _left_behind(name: str) -> str:
    """Why a variable is not for the other engine's command; "" if it is."""
    if _OWN_ENV.match(name):
        return "a variable of the engine's own"
    return "a secret: set it again" if SECRET_NAME.search(name) else ""


def _env_pair(name: str, value: str) -> Pair:
    reason = _left_behind(name)
    if not reason:
        shown = f"{name}={shlex.quote(value)}"
        return Pair(shown, shown, "equal", "holds for any engine")
    return Pair(name if reason.startswith("a secret") else f"{name}={value}", "", "none", reason)


def _translate_simple(draft: _Draft, item: GivenFlag, to_sglang: bool) -> None:
    name = item.flag.name
    pair = (BY_VLLM if to_sglang else BY_SGLANG).get(name)
    if pair is None or item.path:
        reasons = NO_SGLANG if to_sglang else NO_VLLM
        draft.put(item, [], "none", reasons.get(name, "no counterpart"))
        return
    other = pair.sglang if to_sglang else pair.vllm
    if pair.inverted:
        off = item.negated if to_sglang else True
        targets = [[other if to_sglang else "--no-" + other[2:]]] if off else []
        draft.put(item, targets, pair.verdict if off else "equal", pair.text if off else "on by default")
    elif item.negated:
        draft.put(item, [], "equal", "off by default")
    else:
        value = _plain_numbers(draft, item)
        words = [other, *value] if other != "--served-model-name" or not to_sglang else [other, *value[:1]]
        refused = _refused(other, words[1:], to_sglang)
        if refused:
            draft.put(item, [], "none", refused)
        else:
            draft.put(item, [words], pair.verdict, pair.text)


def _refused(other: str, value: list[str], to_sglang: bool) -> str:
    """Why the other engine would not take this value; "" if it does."""
    row = table("sglang" if to_sglang else "vllm").find(other)
    if row is None or not value:
        return ""
    if other == "--context-length" and value[0] in {"-1", "auto"}:
        return "the model's own length is the default"
    if row.choices and value[0] not in row.choices:
        return f"{other} takes only {', '.join(row.choices)}"
    try:
        check_kind(row, value[0])
    except BadInput as error:
        return f"{other} {error.hint}"
    return ""


def _plain_numbers(draft: _Draft, item: GivenFlag) -> list[str]:
    """The words of a value; suffixes are spelt out, since the engines read them differently."""
    if item.flag.kind in {"human", "iec"}:
        return [str(draft.given.integer(item.flag.name, minimum=None))]
    return list(item.words)


def _key(item: GivenFlag) -> str:
    return item.flag.name + "." + item.path


def _shown(item: GivenFlag) -> str:
    return shlex.join([item.spelling, *item.words])


# -- vLLM -> SGLang -----------------------------------------------------------------------------------


def _budget_to_sglang(draft: _Draft) -> None:
    tokens, chunked = draft.given.get("--max-num-batched-tokens"), draft.given.get("--enable-chunked-prefill")
    off = chunked is not None and chunked.negated
    if chunked is not None:
        text = "SGLang then lets the first request exceed --max-prefill-tokens" if off else "on by default"
        draft.put(
            chunked, [["--chunked-prefill-size", "-1"]] if off else [], "near" if off else "equal", text
        )
    if tokens is None:
        return
    size = draft.given.integer("--max-num-batched-tokens") or 0
    text = "vLLM's budget covers decodes and prefills of one step; SGLang's covers prefills only"
    if off:
        draft.put(tokens, [["--max-prefill-tokens", str(size)]], "near", text)
        return
    page = draft.given.integer("--block-size") or 1
    if size % page:
        size, text = max(size - size % page, page), text + f"; rounded down to pages of {page}"
    targets = [["--chunked-prefill-size", str(size)]]
    if size > SGLANG_PREFILL_LIMIT:
        targets.append(["--max-prefill-tokens", str(size)])
    draft.put(tokens, targets, "near", text)


def _pool_to_sglang(draft: _Draft) -> None:
    block_flag = draft.given.get("--block-size")
    block = draft.given.integer("--block-size") or VLLM_BLOCK
    if block_flag is not None:
        text = "granularity of prefix hits; SGLang's default is 1"
        draft.put(block_flag, [["--page-size", str(block)]], "near", text)
    blocks = draft.given.get("--num-gpu-blocks-override")
    if blocks is not None:
        count = draft.given.integer("--num-gpu-blocks-override") or 0
        text = f"blocks of {block} tokens; SGLang can only lower its pool"
        draft.put(blocks, [["--max-total-tokens", str(count * block)]], "near", text)


def _policy_to_sglang(draft: _Draft) -> None:
    policy = draft.given.get("--scheduling-policy")
    if policy is None:
        return
    if policy.text == "priority":
        draft.put(
            policy,
            [
                ["--enable-priority-scheduling"],
                ["--schedule-low-priority-values-first"],
                ["--disable-priority-preemption"],
            ],
            "near",
            "lower values first and no preemption, as in vLLM; memory victims are chosen differently",
        )
    else:
        draft.put(policy, [["--schedule-policy", "fcfs"]], "equal")


def _experts_to_sglang(draft: _Draft) -> None:
    experts = draft.given.get("--enable-expert-parallel")
    if experts is None:
        return
    if experts.negated:
        draft.put(experts, [], "equal", "off by default")
        return
    tp = draft.given.integer("--tensor-parallel-size") or 1
    draft.put(experts, [["--ep-size", str(tp)]], "near", "vLLM spreads experts over TP x DP ranks")


def _interval_to_sglang(draft: _Draft) -> None:
    interval = draft.given.get("--prefill-schedule-interval")
    if interval is not None:
        steps = draft.given.integer("--prefill-schedule-interval") or 1
        text = "vLLM counts steps between prefills, SGLang decode rounds"
        draft.put(interval, [["--prefill-decode-interval", str(steps - 1)]], "near", text)


_KV_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "nvfp4": "nvfp4",
    "bf16": "bfloat16",
}


def _kv_dtype(draft: _Draft) -> None:
    dtype = draft.given.get("--kv-cache-dtype")
    if dtype is None:
        return
    other = _KV_DTYPES.get(dtype.text or "")
    if other is None:
        draft.put(dtype, [], "none", f"the other engine has no {dtype.text} KV cache")
    else:
        draft.put(dtype, [["--kv-cache-dtype", other]], "equal")


# -- SGLang -> vLLM -----------------------------------------------------------------------------------


def _budget_to_vllm(draft: _Draft) -> None:
    chunk, limit = draft.given.get("--chunked-prefill-size"), draft.given.get("--max-prefill-tokens")
    size = draft.given.integer("--chunked-prefill-size", minimum=None) if chunk is not None else None
    if chunk is not None and size is not None and size > 0:
        text = "SGLang's chunk holds prefills only; vLLM's budget covers decodes too"
        draft.put(chunk, [["--max-num-batched-tokens", str(size)]], "near", text)
    elif chunk is not None:
        text = "vLLM then needs a budget of at least --max-model-len"
        draft.put(chunk, [["--no-enable-chunked-prefill"]], "near", text)
        if limit is not None:
            tokens = draft.given.integer("--max-prefill-tokens") or 0
            text = "SGLang's first prompt may exceed it; vLLM's may not"
            draft.put(limit, [["--max-num-batched-tokens", str(tokens)]], "near", text)


def _pool_to_vllm(draft: _Draft) -> None:
    page_flag = draft.given.get("--page-size")
    page = draft.given.integer("--page-size") or VLLM_BLOCK
    if page_flag is not None:
        text = "granularity of prefix hits; vLLM's kernels want multiples of 16"
        draft.put(page_flag, [["--block-size", str(page)]], "near", text)
    tokens = draft.given.get("--max-total-tokens")
    if tokens is not None:
        count = max((draft.given.integer("--max-total-tokens") or 0) // page, 1)
        text = f"blocks of {page} tokens; vLLM replaces its estimate by it"
        draft.put(tokens, [["--num-gpu-blocks-override", str(count)]], "near", text)


def _policy_to_vllm(draft: _Draft) -> None:
    policy, priority = draft.given.get("--schedule-policy"), draft.given.get("--enable-priority-scheduling")
    low_first = draft.given.get("--schedule-low-priority-values-first")
    if priority is not None:
        text = "vLLM never preempts a running request for a waiting one"
        if low_first is None:
            text += "; its lower values come first, SGLang's higher ones: turn the clients' values round"
        draft.put(priority, [["--scheduling-policy", "priority"]], "near", text)
        if low_first is not None:
            draft.put(low_first, [["--scheduling-policy", "priority"]], "equal", "as vLLM's priorities are")
        kept = draft.given.get("--disable-priority-preemption")
        if kept is not None:
            draft.put(kept, [["--scheduling-policy", "priority"]], "equal", "vLLM never preempts by priority")
    if policy is not None and policy.text == "fcfs" and priority is None:
        draft.put(policy, [["--scheduling-policy", "fcfs"]], "equal")
    elif policy is not None:
        draft.put(policy, [], "none", NO_VLLM["--schedule-policy"])


def _experts_to_vllm(draft: _Draft) -> None:
    experts = draft.given.get("--ep-size")
    if experts is None:
        return
    on = (draft.given.integer("--ep-size") or 1) > 1
    text = "vLLM spreads experts over TP x DP ranks" if on else "off by default"
    draft.put(experts, [["--enable-expert-parallel"]] if on else [], "near" if on else "equal", text)


def _interval_to_vllm(draft: _Draft) -> None:
    interval = draft.given.get("--prefill-decode-interval")
    if interval is not None:
        rounds = draft.given.integer("--prefill-decode-interval", minimum=0) or 0
        text = "vLLM counts steps between prefills, SGLang decode rounds; 0.28 heeds it with DP only"
        draft.put(interval, [["--prefill-schedule-interval", str(rounds + 1)]], "near", text)


_TO_SGLANG: tuple[Callable[[_Draft], None], ...] = (
    _budget_to_sglang,
    _pool_to_sglang,
    _policy_to_sglang,
    _experts_to_sglang,
    _interval_to_sglang,
    _kv_dtype,
)
_TO_VLLM: tuple[Callable[[_Draft], None], ...] = (
    _budget_to_vllm,
    _pool_to_vllm,
    _policy_to_vllm,
    _experts_to_vllm,
    _interval_to_vllm,
    _kv_dtype,
)
