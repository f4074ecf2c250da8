"""Times of expiry are those that a library for certificates reads."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common.certificates import first_expiry

KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(expires: datetime.datetime, names: int = 1) -> bytes:
    """PEM; the more `names`, the longer are the lengths in it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 60)] * names)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(expires)
        .sign(KEY, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


# From 2050 on, times are written in another way.
@pytest.mark.parametrize("year", [2027, 2049, 2050, 2300])
@pytest.mark.parametrize("names", [1, 3, 9])
def test_a_certificate_expires_when_it_says(year: int, names: int) -> None:
    expires = datetime.datetime(year, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)

    assert first_expiry(certificate(expires, names)) == expires.timestamp()


def test_a_chain_expires_with_its_first() -> None:
    soon, late = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2030, 2040))

    chain = b"# Ours\n" + certificate(late) + b"# Its issuer\n" + certificate(soon) + certificate(late)

    assert first_expiry(chain) == soon.timestamp()
