"""A certificate authority of a test's own."""

import datetime
import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into a folder. `file` holds its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.file = folder / f"{name}.pem"
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        replace(self.file, self._signed(certificate))

    def issue(self, name: str, host: str = "localhost", days: int = 1) -> Pair:
        """A pair for `host` and 127.0.0.1 in `NAME.pem` and `NAME.key`, for `days`; replaces an older one."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key, days).add_extension(
            x509.SubjectAlternativeName(names), False
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        replace(pair.key, private_bytes(key))
        replace(pair.certificate, self._signed(certificate))
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + days * DAY)
        )

    def _signed(self, certificate: x509.CertificateBuilder) -> bytes:
        return certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def private_bytes(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    """PEM, encrypted if there is a password."""
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def replace(path: Path, content: bytes) -> None:
    """Writes a file in one go, as tools that rotate certificates do."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)
