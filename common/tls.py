"""Certificates of servers and clients, read anew when their files change.

A server reads them for each new connection, a client for each new channel. Files that break while in use are
logged once, and what was read before stays.
"""

import math
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from common import metrics
from common.config import ConfigError
from common.reload import Reloading, read_file


@dataclass(frozen=True)
class _Identity:
    """A certificate chain, its key, and the CAs of peers, all PEM; empty where none is given."""

    certificate: bytes
    key: bytes
    ca: bytes
    # The same for a server of Python's own, which also proves that they go together.
    context: ssl.SSLContext
    # Unix time at which the first of the chain expires.
    expires: float


class _Files:
    """The files behind an end's options `--<prefix>-cert-file`, `-key-file` and `ca_option`."""

    def __init__(
        self, prefix: str, certificate: Path | None, key: Path | None, ca_option: str, ca: Path | None
    ) -> None:
        """Reads them.

        Raises:
            ConfigError: a file is missing or broken, or one of certificate and key is not given.
        """
        self._certificate_option, self._key_option = f"--{prefix}-cert-file", f"--{prefix}-key-file"
        self._ca_option = ca_option
        self._certificate, self._key, self._ca = certificate, key, ca
        if (certificate is None) != (key is None):
            given, missing = self._certificate_option, self._key_option
            if certificate is None:
                given, missing = missing, given
            raise ConfigError(f"{given} needs {missing}")
        paths = [path for path in (certificate, key, ca) if path is not None]
        self.current = Reloading(prefix, paths, self._read).current
        if certificate is not None:
            metrics.EXPIRY.labels(prefix).set_function(lambda: self.current().expires)

    def _read(self) -> _Identity:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate = key = ca = b""
        expires = math.inf
        if self._ca is not None:
            ca = _read_certificates(self._ca_option, self._ca)
            context.load_verify_locations(cadata=ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        if self._certificate is not None and self._key is not None:
            certificate = _read_certificates(self._certificate_option, self._certificate)
            key = read_file(self._key_option, self._key)
            try:
                # Without one, it would ask the terminal for the password of an encrypted key.
                context.load_cert_chain(self._certificate, self._key, password="")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{self._key_option} {self._key}: not the unencrypted PEM key of the first certificate "
                    f"in {self._certificate_option} {self._certificate}"
                ) from error
            expires = _first_expiry(certificate)
        return _Identity(certificate, key, ca, context, expires)


def _read_certificates(option: str, path: Path) -> bytes:
    content = read_file(option, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{option} {path}: holds no PEM certificates") from error
    return content


def _first_expiry(certificates: bytes) -> float:
    # Takes a while to import, for nothing where there is no certificate.
    from cryptography import x509

    try:
        chain = x509.load_pem_x509_certificates(certificates)
        return min(one.not_valid_after_utc.timestamp() for one in chain)
    except ValueError:
        # OpenSSL is less strict, and it is what serves.
        return math.nan


class ServerTls:
    """How a server proves who it is, and of which CA its clients must be.

    Attributes:
        requires_clients: Clients without a certificate of the client CA are refused.
    """

    def __init__(self, certificate: Path | None, key: Path | None, client_ca: Path | None) -> None:
        """Raises ConfigError as `server_tls` does."""
        self.requires_clients = client_ca is not None
        self._files = _Files("tls", certificate, key, "--tls-client-ca-file", client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port."""
        used = self._files.current()

        def renewed() -> Any:
            """gRPC asks before each handshake; None: as before."""
            nonlocal used
            identity = self._files.current()
            if identity is used:
                return None
            used = identity
            return _configuration(identity)

        return grpc.dynamic_ssl_server_credentials(_configuration(used), renewed, self.requires_clients)

    def ssl_context(self) -> ssl.SSLContext:
        """For a server of Python's own, such as an HTTP server on asyncio."""
        context = self._files.current().context

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._files.current().context

        # Called in each handshake, whether the client names a server or not.
        context.sni_callback = renew
        return context


def _configuration(identity: _Identity) -> Any:
    pairs = [(identity.key, identity.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, identity.ca or None)


def target_name(server_name: str | None) -> list[tuple[str, str]]:
    """Options of a gRPC channel whose server's certificate has this name; None: the host of the address."""
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []


class ClientTls:
    """Whom a client trusts, and how it proves who it is."""

    def __init__(
        self, prefix: str, ca: Path, certificate: Path | None, key: Path | None, server_name: str | None
    ) -> None:
        """Raises ConfigError as `client_tls` does."""
        self._files = _Files(prefix, certificate, key, f"--{prefix}-ca-file", ca)
        # Of gRPC channels.
        self.options = target_name(server_name)

    def credentials(self) -> grpc.ChannelCredentials:
        """For a new channel; one that lives on keeps its own."""
        identity = self._files.current()
        return grpc.ssl_channel_credentials(identity.ca, identity.key or None, identity.certificate or None)


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """What `--tls-cert-file`, `--tls-key-file` and `--tls-client-ca-file` ask for; None: no TLS.

    Raises:
        ConfigError: they don't go together, or a file can't be used; the message names the option.
    """
    if certificate is not None or key is not None:
        return ServerTls(certificate, key, client_ca)
    if client_ca is not None:
        raise ConfigError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
    return None


def client_tls(
    prefix: str, ca: Path | None, certificate: Path | None, key: Path | None, server_name: str | None = None
) -> ClientTls | None:
    """What `--<prefix>-ca-file`, `-cert-file`, `-key-file` and `-server-name` ask for; None: no TLS.

    Raises:
        ConfigError: they don't go together, or a file can't be used; the message names the option.
    """
    if ca is not None:
        return ClientTls(prefix, ca, certificate, key, server_name)
    for name, given in (("cert-file", certificate), ("key-file", key), ("server-name", server_name)):
        if given is not None:
            raise ConfigError(f"--{prefix}-{name} needs --{prefix}-ca-file")
    return None
