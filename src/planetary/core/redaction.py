"""Secrets in texts that leave the process: in answers, logs, errors and pages, and in records sent elsewhere.

A configuration keeps a URL with the password, since the run needs it; every text for people and programs elsewhere goes
through `redacted` once, on the way out.
"""

from __future__ import annotations

import re

HIDDEN = "…"

# userinfo of a URL: a password, or a token alone. "\\" and quotes end it, so JSON and TOML stay what they are.
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)[^/\s@\"'\\<>?#]+(?::[^\s@\"'\\<>]*)?@")
# parameters of signed links (S3, GCS, Azure, CloudFront) and of common APIs
_PARAMETERS = re.compile(
    r"(?i)(?P<name>[?&;](?:amp;)?(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid"
    r"|signature|sig|policy|key-pair-id|[a-z0-9_.-]*(?:token|secret|password|passwd|pwd|api[_-]?key|apikey|credentials?)"
    r"|pass|auth|authorization|key)=)[^&;\s\"'\\<>#]+"
)
# addresses that are secret as a whole
_WEBHOOKS = re.compile(
    r"(?i)(?P<place>https://(?:hooks\.slack\.com/(?:services|workflows|triggers)"
    r"|(?:ptb\.|canary\.)?discord(?:app)?\.com/api/webhooks|[a-z0-9.-]+\.webhook\.office\.com|hooks\.zapier\.com))"
    r"/[^\s\"'\\<>]+"
)
_WEBHOOK_SINKS = re.compile(r"(\[\[sinks\]\]\n(?:(?!\[)[^\n]*\n)*?url = )\"(?:[^\"\\\n]|\\.)*\"")


def redacted(text: str) -> str:
    """Return `text` with "…" for passwords and tokens: userinfo and known parameters of URLs, addresses of webhooks."""
    if "://" in text:
        text = _WEBHOOKS.sub(rf"\g<place>/{HIDDEN}", _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text))
    return _PARAMETERS.sub(rf"\g<name>{HIDDEN}", text) if "=" in text else text


def redacted_toml(text: str) -> str:
    """Return a configuration, as `to_toml` writes it, without secrets: as `redacted`, and any webhook's address."""
    return redacted(_WEBHOOK_SINKS.sub(rf'\1"{HIDDEN}"', text))
