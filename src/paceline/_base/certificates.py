"""Certificates: trust of a client, names of a server, and errors in plain words."""

import os
import re
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

CA_FILE_VARIABLE = "PACELINE_CA_FILE"

# The probe only improves an error's text, so it must not take long.
_PROBE_S = 5.0
_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
# OpenSSL's reasons for a server answering without TLS.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})


def client_tls(certificate: str | None = None, ca_file: str | None = None) -> ssl.SSLContext:
    """Return a client's TLS context with the trusted certificates.

    Args:
        certificate: The one certificate of a server, as PEM, that is trusted whatever its name.
        ca_file: Certificates of authorities; by default the file that `PACELINE_CA_FILE` names,
            else those that the system or `SSL_CERT_FILE` trusts.

    Raises:
        ValueError: The file of authorities cannot be read.
    """
    if certificate is not None:
        return _trusting(certificate)
    ca_file = ca_file or os.environ.get(CA_FILE_VARIABLE) or None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"{CA_FILE_VARIABLE} must be a file with certificates (PEM), but {ca_file!r} is not"
            f" ({_reason(error)})."
        ) from error


def check_server_files(certificate: Path, key: Path) -> str:
    """Check a server's certificate and key, and return the certificate as PEM, without its chain.

    Raises:
        ValueError: A file cannot be read, others may read the key, the two do not belong together,
            or the certificate is not valid now.
    """
    try:
        found = _CERTIFICATE.search(certificate.read_text(encoding="utf-8"))
        mode = stat.S_IMODE(key.stat().st_mode)
        key.read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`--tls-cert` and `--tls-key` must be files that can be read, but got {error}."
        ) from error
    if found is None:
        raise ValueError(
            f"`--tls-cert` must be a file with a certificate (PEM), but {str(certificate)!r} has"
            " none."
        )
    if mode & 0o007:
        raise ValueError(
            f"`--tls-key` must be a file that others may not read, but {str(key)!r} has mode"
            f" {mode:04o}. Hint: chmod 600 {key}"
        )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        server.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ValueError(
            "`--tls-cert` and `--tls-key` must be a certificate and its own key, without a"
            f" passphrase, but got {str(certificate)!r} and {str(key)!r} ({_reason(error)})."
        ) from error
    try:
        _shake_hands(server, _trusting(found[0]))
    except ssl.SSLError as error:
        raise ValueError(
            f"`--tls-cert` must be a certificate that is valid now, but {str(certificate)!r} is"
            f" refused: {_reason(error)}."
        ) from error
    return found[0]


def server_names(certificate: Path, key: Path) -> list[str]:
    """Return the names, then the addresses, of a server's checked certificate."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    found = _CERTIFICATE.search(certificate.read_text(encoding="utf-8"))
    assert found is not None
    shown = _shake_hands(server, _trusting(found[0])) or {}
    given: list[tuple[str, str]] = list(shown.get("subjectAltName", ()))
    return [text for kind in ("DNS", "IP Address") for known, text in given if known == kind]


def tls_error_of(error: BaseException | None) -> ssl.SSLError | None:
    """Return the error of TLS among an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ssl.SSLError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explain_tls_error(error: ssl.SSLError, url: str) -> str | None:
    """Return a server's TLS problem and a hint; None if the connection only broke."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = error.verify_message
        hint = (
            f"name the certificate of its authority by `--ca-file` or {CA_FILE_VARIABLE}, if you"
            " know that this is your master."
        )
        if "expired" in text or "not yet valid" in text:
            hint = "renew the certificate of the master, and check the clocks of both machines."
        elif "mismatch" in text:
            hint = "use a host name that the certificate is for."
        return f"The master at {url} must show a certificate that can be trusted, but: {text}." + (
            f" Hint: {hint}"
        )
    if error.reason in _NOT_TLS:
        return (
            f"The master at {url} must answer by TLS, but answers without."
            f" Hint: its address begins with http://, or it was started without `--tls-cert`."
        )
    return None


def explain_missing_tls(url: str, host: str | None, port: int | None) -> str | None:
    """Return a hint if a server closing the connection expects TLS; None if not."""
    context = ssl.create_default_context()
    context.check_hostname = False
    # Nothing is sent: this only asks whether TLS is spoken there.
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host or "127.0.0.1", port or 80), timeout=_PROBE_S) as plain,
            context.wrap_socket(plain),
        ):
            pass
    except OSError:
        return None
    secure = url.replace("http://", "https://", 1)
    return f"The master at {url} must be asked by TLS, but was not. Hint: its address is {secure}"


def _trusting(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate itself is known; its name is that by which other machines reach it.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any] | None:
    """Connect a client to a server in memory, and return the server certificate's facts."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Bounded: more rounds than a handshake needs, where a fault could make it endless.
    for _ in range(4):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert()


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
