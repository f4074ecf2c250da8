"""What identifies the content of a full block: its tokens, all before them, and who may see them."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def root_hash(*keys: str) -> bytes:
    """The parent of a sequence's first block. Other keys (adapter, tenant, salt), other hashes."""
    return blake2b(b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in keys)).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block after `parent`; 16 bytes of BLAKE2b, so that nobody finds a collision."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()
