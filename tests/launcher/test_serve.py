from pathlib import Path

import pytest

from launcher.config import ServeConfig
from launcher.serve import welcome_text

ADDRESSES = {"listen-address": ServeConfig.listen_address}


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        ([], ""),
        (["tls_cert_file", "tls_key_file"], " --tls-ca-file CA.pem"),
        (
            ["tls_cert_file", "tls_key_file", "tls_client_ca_file"],
            " --tls-ca-file CA.pem --tls-cert-file CERT.pem --tls-key-file KEY.pem",
        ),
    ],
)
def test_the_printed_command_has_the_certificates_that_the_server_asks_for(
    files: list[str], flags: str
) -> None:
    config = ServeConfig(**{name: Path("x.pem") for name in files})  # type: ignore[arg-type]
    text = welcome_text(config, "tiny", ADDRESSES, [], 1.0)
    assert f"-m launcher chat{flags} --prompt" in text
