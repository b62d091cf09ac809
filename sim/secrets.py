"""Keys and tokens in what a user pasted, kept out of everything that is printed or written."""

from __future__ import annotations

import re

# Names of variables that hold one: HF_TOKEN, OPENAI_API_KEY, ...
SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PWD|_PASS|KEY|CREDENTIALS?)$", re.IGNORECASE
)
_TOKENS = r"(?:auth|access|hf|bearer)_?token|(?<![a-z_])token"  # not bos_token and its like
_NAMES = rf"(?:api_?key|secret|password|credentials?|authorization|{_TOKENS})"
_SHAPES = re.compile(
    rf"""(Bearer\s+)\S+
    |(?<![\w-])(?:sk[-_]|hf_|pk[-_]|ghp_)[A-Za-z0-9_\-]{{8,}}
    |(\b\w*(?:TOKEN|SECRET|PASSWORD|_KEY)=['"]?)[^\s'"]+
    |({_NAMES}["']\s*:\s*["'])[^"']*
    |({_NAMES}["']\s*:\s*\[)[^\]]*
    |(--(?:api-key|hf-token|ssl-keyfile-password)[=\s]['"]?)[^\s'"]+
    |(\b(?:api-key|hf-token|ssl-keyfile-password)=['"]?)[^\s'"]+
    |(://[^\s/:@]*:)[^\s/@]+(?=@)""",
    re.IGNORECASE | re.VERBOSE,
)


def without_secrets(text: str) -> str:
    """`text` with what looks like a key, a token or a password replaced by ***."""
    return _SHAPES.sub(lambda match: f"{next(filter(None, match.groups()), '')}***", text)
