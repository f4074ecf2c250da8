"""Who calls: API keys, of which this router knows the SHA-256 alone, and what each may use."""

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import yaml

from common.config import ConfigError, StrictLoader
from common.reload import Reloading, read_file
from router.errors import RequestError
from router.token_budget import TokenBudget

MAX_KEYS: Final = 4096
MAX_LIMIT: Final = 2**31 - 1

_OPTION: Final = "--api-keys-file"
_FIELDS: Final = ("id", "key_sha256", "max_concurrent_requests", "tokens_per_minute")
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_CHECK_PERIOD_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenant:
    """Whom a request is for.

    Attributes:
        id: Of the API key; empty where none is asked for.
        max_concurrent_requests: Of each scheduler at once; 0: no limit.
        budget: Tokens of this router; None: no limit.
    """

    id: str = ""
    max_concurrent_requests: int = 0
    budget: TokenBudget | None = None

    def check_budget(self) -> None:
        """To be called before a request begins.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, with the time until the tokens used before are paid off.
        """
        wait_s = self.budget.wait_s() if self.budget else 0.0
        if wait_s and self.budget:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"key {self.id!r} has used its {self.budget.tokens_per_minute} tokens per minute; try again "
                f"in {wait_s:.3g} s",
                reason="TOKEN_RATE_EXCEEDED",
                retry_delay=wait_s,
            )

    def use_tokens(self, count: int) -> None:
        """Takes them from the budget, if there is one."""
        if self.budget:
            self.budget.take(count)


def new_key() -> str:
    """256 random bits, so that one SHA-256 of them hides them."""
    return "pgd-" + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What a keys file holds of a key."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


class Authenticator:
    """Tells callers apart by their keys; without a file of keys, everybody is one tenant without limits."""

    def __init__(self, path: Path | None) -> None:
        """Reads `--api-keys-file`.

        Raises:
            ConfigError: the file can't be used; the message names the option and the entry.
        """
        self._tenants: Mapping[str, Tenant] = {}
        self._path = path
        self._file = None if path is None else Reloading("api-keys", [path], self._read)

    @property
    def asks_for_keys(self) -> bool:
        """Whether a call needs a key."""
        return self._file is not None

    def authenticate(self, authorization: str | None) -> Tenant:
        """Whose key an `authorization` header or metadata value carries, as `Bearer KEY`.

        Raises:
            RequestError: UNAUTHENTICATED, the same for every wrong one and for none.
        """
        if self._file is None:
            return Tenant()
        scheme, _, key = (authorization or "").partition(" ")
        # Found by its hash: what the time of the look-up tells of a hash helps nobody to find a key.
        tenant = self._tenants.get(digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            message = "no valid API key; send 'authorization: Bearer KEY'"
            raise RequestError(grpc.StatusCode.UNAUTHENTICATED, message, reason="INVALID_API_KEY")
        return tenant

    async def watch(self) -> None:
        """Reads the file anew whenever it changes, until cancelled; a broken one changes nothing."""
        while self._file is not None:
            await asyncio.to_thread(self._file.current)
            await asyncio.sleep(_CHECK_PERIOD_S)

    def _read(self) -> None:
        assert self._path is not None  # noqa: S101
        content = read_file(_OPTION, self._path)
        with contextlib.suppress(OSError):
            if self._path.stat().st_mode & stat.S_IROTH:
                _log.warning("%s %s can be read by everybody on this machine", _OPTION, self._path)
        budgets = {tenant.id: tenant.budget for tenant in self._tenants.values()}
        self._tenants = _parse(self._path, content, budgets)


def _parse(path: Path, content: bytes, budgets: Mapping[str, TokenBudget | None]) -> dict[str, Tenant]:
    """The tenants by the SHA-256 of their keys. Those with a budget of the same size keep theirs."""
    try:
        entries = yaml.load(content, StrictLoader)  # noqa: S506
    except ConfigError as error:
        raise ConfigError(f"{_OPTION} {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        # Without what it says: it quotes the file, and somebody may have put a key there.
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{_OPTION} {path}{line}: not YAML") from None
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        raise ConfigError(f"{_OPTION} {path}: must be a list of 1 to {MAX_KEYS} entries")
    tenants: dict[str, Tenant] = {}
    ids: set[str] = set()
    for number, entry in enumerate(entries, 1):
        where = f"{_OPTION} {path}, entry {number}"
        key_hash, tenant = _parse_entry(where, entry, budgets)
        if tenant.id in ids or key_hash in tenants:
            raise ConfigError(f"{where}: its {'id' if tenant.id in ids else 'key_sha256'} stands there twice")
        ids.add(tenant.id)
        tenants[key_hash] = tenant
    return tenants


def _parse_entry(where: str, entry: Any, budgets: Mapping[str, TokenBudget | None]) -> tuple[str, Tenant]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping of {', '.join(_FIELDS)}")
    if strange := [name for name in entry if name not in _FIELDS]:
        raise ConfigError(f"{where}: unknown name {str(strange[0])[:40]!r}; there are {', '.join(_FIELDS)}")
    key_hash = entry.get("key_sha256")
    if not isinstance(key_hash, str) or not _SHA256.fullmatch(key_hash):
        raise ConfigError(f"{where}: key_sha256 must be 64 hexadecimal digits in lower case, quoted")
    requests = _parse_limit(where, entry, "max_concurrent_requests")
    rate = _parse_limit(where, entry, "tokens_per_minute")
    tenant_id = check_id(where, entry.get("id"))
    budget = budgets.get(tenant_id)
    if budget is None or budget.tokens_per_minute != rate:
        budget = TokenBudget(rate) if rate else None
    return key_hash, Tenant(tenant_id, requests, budget)


def check_id(where: str, value: Any) -> str:
    """The id of a key, as it stands at `where`.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ConfigError(f"{where}: id must be 1 to 64 letters, digits, '.', '_' and '-', the first no sign")
    return value


def _parse_limit(where: str, entry: dict[Any, Any], name: str) -> int:
    value = entry.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise ConfigError(f"{where}: {name} must be a whole number from 1 to {MAX_LIMIT}")
    return value
