"""When certificates expire, read from their DER (RFC 5280, section 4.1), which needs no library."""

import datetime
import re
import ssl
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION_TAG: Final = 0xA0
_UTC_TIME_TAG: Final = 0x17


def first_expiry(pem: bytes) -> float:
    """The Unix time at which the first of these certificates expires."""
    return min(_expiry(ssl.PEM_cert_to_DER_cert(match[0])) for match in _PEM.finditer(pem.decode()))


def _expiry(der: bytes) -> float:
    _, certificate, _ = _element(der, 0)
    _, position, _ = _element(der, certificate)
    tag, _, end = _element(der, position)
    if tag == _VERSION_TAG:
        position = end
    # Serial number, algorithm, issuer.
    for _ in range(3):
        _, _, position = _element(der, position)
    _, not_before, _ = _element(der, position)
    _, _, not_after = _element(der, not_before)
    tag, start, end = _element(der, not_after)
    text = der[start:end].decode()
    if tag == _UTC_TIME_TAG:
        text = ("20" if text[:2] < "50" else "19") + text
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%S%z").timestamp()


def _element(der: bytes, position: int) -> tuple[int, int, int]:
    """Tag, and where the content begins and ends, of the element at a position."""
    tag, size, start = der[position], der[position + 1], position + 2
    if size >= 0x80:
        width = size - 0x80
        size = int.from_bytes(der[start : start + width])
        start += width
    return tag, start, start + size
