"""What access tokens of common services look like: one row per format. Data only; `secrets` does the searching.

Source: the services' own documentation of their formats; the list of patterns that GitHub's secret scanning supports;
the public rules of gitleaks and detect-secrets, for formats that a service does not document (wandb, Databricks, npm).
docs/concepts/secrets.md lists what users should know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_IS = r"[\s\"'\\`\]]{0,5}[:=,(\s][\s\"'\\`:=(]{0,8}"
"""Between a name and its value: in Python, JSON (also inside of a string), YAML, TOML, shell and .env."""
_GAP = r"(?:\s|\\[nrt]){1,8}"
"""Between two words, also inside of a string of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRule:
    """One format."""

    kind: str
    """What people call it, with an article."""
    anchors: tuple[str, ...]
    """Literals, in lower case; every match begins with one of them."""
    pattern: str
    """Matched at the anchor; its group is the secret. Every repetition is bounded."""
    whole: bool = True
    """No letter, digit or underscore stands directly before or after the match."""
    random: bool = False
    """The format alone says little: the value must look random, not like a name or a path."""


def _token(kind: str, prefix: str, value: str, *, random: bool = False) -> SecretRule:
    """Return the rule of a literal (or of several, with bars between them) that has a value behind it."""
    literals = prefix.split("|")
    pattern = f"(?:{'|'.join(map(re.escape, literals))})({value})"
    return SecretRule(kind=kind, anchors=tuple(map(str.lower, literals)), pattern=pattern, random=random)


SECRET_RULES: tuple[SecretRule, ...] = (
    # Models and their hubs
    _token("a Hugging Face token", "hf_|api_org_", r"[A-Za-z0-9]{34}"),
    SecretRule(
        kind="an OpenAI API key",
        anchors=("sk-",),
        pattern=r"sk-(?:proj-|svcacct-|admin-|service-|None-)?"
        r"([A-Za-z0-9_-]{16,200}T3BlbkFJ[A-Za-z0-9_-]{16,200}|[A-Za-z0-9]{48})",
    ),
    _token("an OpenAI API key", "sk-proj-|sk-svcacct-|sk-admin-", r"[A-Za-z0-9_-]{40,400}", random=True),
    SecretRule(
        kind="an Anthropic API key", anchors=("sk-ant-",), pattern=r"sk-ant-[a-z]{2,8}[0-9]{2}-([A-Za-z0-9_-]{60,400})"
    ),
    _token("an OpenRouter API key", "sk-or-v1-", r"[0-9a-f]{64}"),
    _token("a Langfuse secret key", "sk-lf-", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    _token("an API key (DeepSeek, DashScope)", "sk-", r"[0-9a-f]{32}"),
    _token("a Replicate token", "r8_", r"[A-Za-z0-9]{37}"),
    _token("a Together API key", "tgp_v1_", r"[A-Za-z0-9_-]{43}"),
    _token("a Groq API key", "gsk_", r"[A-Za-z0-9]{52}"),
    _token("an xAI API key", "xai-", r"[A-Za-z0-9]{80}"),
    _token("a Perplexity API key", "pplx-", r"[A-Za-z0-9]{48,56}"),
    _token("a Cerebras API key", "csk-", r"[a-z0-9]{48}"),
    _token("an NVIDIA API key", "nvapi-", r"[A-Za-z0-9_-]{60,72}"),
    _token("a RunPod API key", "rpa_", r"[A-Z0-9]{40}[A-Za-z0-9]{0,8}"),
    _token("a Jina API key", "jina_", r"[0-9a-f]{32}[A-Za-z0-9_-]{28}"),
    _token("a Pinecone API key", "pcsk_", r"[A-Za-z0-9]{4,8}_[A-Za-z0-9]{40,80}"),
    _token("an ElevenLabs API key", "sk_", r"[0-9a-f]{48}"),
    _token("a Kaggle token", "KGAT_", r"[0-9a-f]{32}"),
    # Trackers of experiments
    _token("a Weights & Biases API key", "wandb_v1_", r"[A-Za-z0-9_]{60,100}"),
    SecretRule(
        kind="a Weights & Biases API key",
        whole=False,
        anchors=("wandb",),
        pattern=r"(?i:wandb)(?:(?i:[._-]?(?:api)?[._-]?(?:key|token))"
        + _IS
        + r"|\.login\(\s{0,8}(?:key\s{0,4}=\s{0,4})?\\{0,3}[\"']"
        + rf"|{_GAP}login{_GAP}(?:--relogin{_GAP})?|\.ai{_GAP}login{_GAP}[\w.-]{{1,64}}{_GAP}password{_GAP})"
        + r"((?:local-)?[0-9a-f]{40})(?![A-Za-z0-9_])",
    ),
    _token("a LangSmith API key", "lsv2_pt_|lsv2_sk_", r"[0-9a-f]{32}_[0-9a-f]{10}"),
    _token("a Neptune API token", "eyJhcGlfYWRkcmVzcyI6", r"[A-Za-z0-9+/=]{60,600}"),
    # Clouds
    _token("an AWS access key id", "AKIA|ASIA|ABIA|ACCA", r"[A-Z2-7]{16}"),
    SecretRule(
        kind="an AWS secret access key",
        whole=False,
        anchors=("secret_access_key", "secretaccesskey", "aws_secret_key"),
        pattern=r"(?i:(?:secret_?access_?|aws_secret_)key)" + _IS + r"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        random=True,
    ),
    _token("an AWS Bedrock API key", "ABSK", r"[A-Za-z0-9+/]{100,300}={0,2}"),
    _token("a Google API key", "AIza", r"[A-Za-z0-9_-]{35}"),
    _token("a Google OAuth client secret", "GOCSPX-", r"[A-Za-z0-9_-]{28}"),
    _token("a Google access token", "ya29.", r"[A-Za-z0-9_-]{40,400}"),
    SecretRule(
        kind="an Azure storage or service key",
        whole=False,
        anchors=("accountkey=", "sharedaccesskey="),
        pattern=r"(?i:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{86}==|[A-Za-z0-9+/]{43}=)",
    ),
    SecretRule(
        kind="an Azure shared access signature",
        whole=False,
        anchors=("sig=",),
        pattern=r"(?<=[?&;])sig=([A-Za-z0-9%]{43,130}%3[Dd])",
        random=True,
    ),
    SecretRule(
        kind="an Azure AI key",
        whole=False,
        anchors=("jqqj99",),
        pattern=r"(?<=[A-Za-z0-9]{52})JQQJ99([A-Za-z0-9]{10}AC[A-Za-z0-9]{14})",
    ),
    SecretRule(
        kind="a Microsoft Entra client secret",
        whole=False,
        anchors=("q~",),
        pattern=r"(?<=[\w~.-]{3}[0-9])Q~([\w~.-]{31,34})(?![\w~-])",
        random=True,
    ),
    _token("a Databricks token", "dapi", r"[0-9a-f]{32}(?:-[0-9])?"),
    _token("a DigitalOcean token", "dop_v1_|doo_v1_", r"[0-9a-f]{64}"),
    _token("a Vault token", "hvs.|hvb.", r"[A-Za-z0-9_-]{24,300}", random=True),
    # Code and packages
    _token("a GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", r"[A-Za-z0-9]{36,251}"),
    _token("a GitHub token", "github_pat_", r"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    _token(
        "a GitLab token",
        "glpat-|gloas-|gldt-|glrt-|glcbt-|glptt-|glft-|glimt-|glagent-|glsoat-",
        r"[A-Za-z0-9_-]{20,64}(?:\.[a-z0-9]{2}\.[a-z0-9]{9})?",
        random=True,
    ),
    _token("an npm token", "npm_", r"[A-Za-z0-9]{36}"),
    SecretRule(
        kind="a PyPI token",
        anchors=("pypi-ageichlwas5vcmc", "pypi-agendgvzdc5wexbplm9yz"),
        pattern=r"pypi-(AgE(?:IcHlwaS5vcmc|NdGVzdC5weXBpLm9yZ)[A-Za-z0-9_-]{50,400})",
    ),
    _token("a Docker Hub token", "dckr_pat_|dckr_oat_", r"[A-Za-z0-9_-]{27,40}"),
    # Messages, mail, money
    SecretRule(
        kind="a Slack token",
        anchors=("xox", "xapp-"),
        pattern=r"(?:xox[abeoprs](?:\.xox[bp])?-(?:[0-9]{1,15}-){1,4}|xapp-[0-9]-[A-Z0-9]{8,14}-[0-9]{8,16}-)([A-Za-z0-9]{20,200})",
    ),
    SecretRule(
        kind="a Slack webhook",
        whole=False,
        anchors=("hooks.slack.com/",),
        pattern=r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Z0-9]{6,14}/[A-Z0-9]{6,20}/([A-Za-z0-9]{20,48})",
    ),
    SecretRule(
        kind="a Discord webhook",
        whole=False,
        anchors=("/api/webhooks/",),
        pattern=r"/api/webhooks/[0-9]{17,20}/([A-Za-z0-9_-]{60,80})",
    ),
    SecretRule(
        kind="a Telegram bot token",
        whole=False,
        anchors=(":aa",),
        pattern=r"(?<=[0-9]{8}):AA([A-Za-z0-9_-]{33})(?![A-Za-z0-9_-])",
        random=True,
    ),
    _token("a Stripe key", "sk_live_|sk_test_|rk_live_|rk_test_", r"[A-Za-z0-9]{24,250}"),
    _token("a SendGrid API key", "SG.", r"[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}", random=True),
    # Keys and sessions of any service
    SecretRule(
        kind="a private key",
        whole=False,
        anchors=("-----begin ",),
        pattern=r"-----BEGIN (?:[A-Z0-9]{2,12} ){0,2}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\\rn]{1,8}[A-Za-z-]{4,16}: ?[^\n\\]{0,100}){0,4}[\s\\rn\"',]{1,16}([A-Za-z0-9+/=]{32})",
    ),
    SecretRule(
        kind="a PuTTY private key", anchors=("putty-user-key-file-",), pattern=r"PuTTY-User-Key-File-[23]: (\S{3,40})"
    ),
    _token("an age secret key", "AGE-SECRET-KEY-1", r"[02-9AC-HJ-NP-Z]{58}"),
    SecretRule(
        kind="a JSON web token",
        anchors=("eyj",),
        pattern=r"eyJ[A-Za-z0-9_-]{15,400}\.eyJ[A-Za-z0-9_-]{15,2000}\.([A-Za-z0-9_-]{40,800})",
    ),
    # Whatever is assigned to a name that only secrets have (Cohere, Comet, Mistral, Modal, Azure OpenAI, SwanLab, …)
    SecretRule(
        kind="a value of an API key, secret or token",
        whole=False,
        anchors=(
            "api_key",
            "apikey",
            "api_token",
            "secret_key",
            "client_secret",
            "access_token",
            "auth_token",
            "token_secret",
        ),
        pattern=r"(?i:api_?key|api_token|secret_key|client_secret|access_token|auth_token|token_secret)"
        r"[\"'\\`\]]{0,5}\s{0,4}(?::=?|=|,)\s{0,4}[\"'\\`]{0,3}([A-Za-z0-9+/_-]{20,200}={0,2})(?![A-Za-z0-9+/_.(\[%-])",
        random=True,
    ),
)
"""Every format that `ckpt push` refuses to send, most specific kinds first."""
