"""Masters that are asked by TLS: certificates that hold, and those that do not."""

import datetime
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from paceline._base.certificates import check_server_files, server_names
from paceline._cluster.master.server import _host_for_others, _Tls, serve
from paceline._cluster.messages.runner_messages import MasterAddress
from paceline._cluster.runner.master_link import MasterLink, UnreachableError, UntrustedMasterError
from paceline.client import Client, MasterUnreachableError

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates; the files lie in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Test authority")])
        built = self._builder(self.name, self.key.public_key(), NOW - DAY, NOW + DAY)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.ca_file = directory / "ca.pem"
        certificate = built.sign(self.key, hashes.SHA256())
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, until: datetime.datetime = NOW + DAY) -> dict[str, Path]:
        """Return the files of a certificate for names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        found: list[x509.GeneralName] = [
            x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name)
            for name in names
        ]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
        built = self._builder(subject, key.public_key(), NOW - 2 * DAY, until)
        built = built.add_extension(x509.SubjectAlternativeName(found), False)
        certificate = built.sign(self.key, hashes.SHA256())
        files = {"tls_cert": self.directory / f"{names[0]}.pem", "tls_key": self.directory / "key"}
        files["tls_cert"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files["tls_key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files["tls_key"].chmod(0o600)
        return files

    def _builder(
        self, subject: x509.Name, key: Any, since: datetime.datetime, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
        )


class TlsMaster:
    """A master in a process of its own."""

    def __init__(self, home: Path, files: dict[str, Path], host: str, slots: int) -> None:
        self.home = home
        arguments = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
        self.command = [
            sys.executable, "-m", "paceline.cli", "up", "--home", str(home), "--port", "0",
            "--host", host, "--slots", str(slots), *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (home / "master.json").exists():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.02)
        self.port = int(json.loads((home / "master.json").read_text())["port"])

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def master(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsMaster]:
    """Return a master that all interfaces reach; its certificate is for `localhost` alone."""
    home = tmp_path_factory.mktemp("tls-home") / "home"
    made = TlsMaster(home, authority.issue("localhost"), "0.0.0.0", 1)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_CA_FILE", "PACELINE_HOME", "PACELINE_MASTER", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_a_client_that_knows_the_authority_is_answered(
    master: TlsMaster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://localhost:{master.port}"
    with Client(url, master.token, ca_file=authority.ca_file) as client:
        assert client.master().num_slots == 1
    monkeypatch.setenv("PACELINE_CA_FILE", str(authority.ca_file))
    with Client(url, master.token) as client:
        assert client.master().num_slots == 1
    link = MasterLink(lambda: MasterAddress(url=url, token=master.token))
    with closing(link):
        assert b"num_slots" in link.get("/master")


def test_programs_on_its_machine_know_it_from_the_home(
    master: TlsMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens on all addresses, and the certificate is for another name than theirs."""
    monkeypatch.setenv("PACELINE_HOME", str(master.home))
    with Client() as client:
        assert client.master().num_slots == 1
        assert client.sign_in_link().startswith("https://")
    with closing(MasterLink.of_home(master.home)) as link:
        assert b"num_slots" in link.get("/master")


def test_trials_run_and_report(
    master: TlsMaster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(master.home))
    (tmp_path / "train.py").write_text(
        "from paceline import core\n"
        "with core.init() as context:\n"
        "    context.train.report_validation_metrics(1, {'loss': 0.5})\n"
    )
    config = {
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
    }
    with Client() as client:
        experiment = client.create_experiment(config, tmp_path)
        assert experiment.wait() == "COMPLETED"
        [trial] = experiment.trials()
        assert trial.best_metric == 0.5


OTHER = "another"


@pytest.mark.parametrize(
    ("host", "known", "message"),
    [
        ("localhost", None, r"can be trusted, but: .*Hint: name the certificate .* `--ca-file`"),
        ("localhost", OTHER, r"can be trusted, but: .*Hint: name the certificate"),
        ("127.0.0.1", "own", r"127\.0\.0\.1'\.* Hint: use a host name that the certificate is for"),
    ],
)
def test_another_authority_or_name_is_refused_by_clients_and_runners(
    master: TlsMaster,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    known: str | None,
    message: str,
) -> None:
    if known is not None:
        issuer = authority if known == "own" else Authority(tmp_path / "other")
        monkeypatch.setenv("PACELINE_CA_FILE", str(issuer.ca_file))
    url = f"https://{host}:{master.port}"
    with Client(url, master.token) as client, pytest.raises(MasterUnreachableError, match=message):
        client.master()
    address = MasterAddress(url=url, token=master.token)
    with pytest.raises(UntrustedMasterError, match=message):
        MasterLink(lambda: address).get("/master")


def test_a_client_without_tls_is_told_so(master: TlsMaster) -> None:
    url = f"http://localhost:{master.port}"
    message = (
        rf"must be asked by TLS, but was not. Hint: its address is https://localhost:{master.port}"
    )
    with Client(url, master.token) as client, pytest.raises(MasterUnreachableError, match=message):
        client.master()
    link = MasterLink(lambda: MasterAddress(url=url, token=master.token))
    with pytest.raises(UntrustedMasterError, match=message):
        link.get("/master")


def test_a_master_without_tls_is_told_so(make_master: Callable[..., Any]) -> None:
    plain = make_master()
    url = f"https://127.0.0.1:{plain.port}"
    message = r"must answer by TLS, but answers without. Hint: its address begins with http://"
    with Client(url, "token") as client, pytest.raises(MasterUnreachableError, match=message):
        client.master()
    link = MasterLink(lambda: MasterAddress(url=url, token="token"))
    with pytest.raises(UntrustedMasterError, match=message):
        link.get("/master")


def test_a_certificate_that_has_expired_is_named_by_the_client(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server started while it was valid, so this one checks nothing."""
    files = authority.issue("localhost", until=NOW - DAY / 2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"https://localhost:{server.getsockname()[1]}"
        message = r"certificate has expired. Hint: renew the certificate of the master"
        with (
            Client(url, "token", ca_file=authority.ca_file) as client,
            pytest.raises(MasterUnreachableError, match=message),
        ):
            client.master()
        monkeypatch.setenv("PACELINE_CA_FILE", str(authority.ca_file))
        link = MasterLink(lambda: MasterAddress(url=url, token="token"))
        with pytest.raises(UnreachableError, match=message):
            link.get("/master")
        thread.join()


def test_a_runner_that_does_not_trust_its_master_ends_and_says_why(
    master: TlsMaster, authority: Authority, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(master.token)
    token.chmod(0o600)
    command = [
        sys.executable, "-m", "paceline.cli", "runner", "--master",
        f"https://127.0.0.1:{master.port}", "--token-file", str(token), "--dir",
        str(tmp_path / "runner"), "--name", "box", "--ca-file", str(authority.ca_file),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "use a host name that the certificate is for" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_browsers_may_use_the_name_of_the_certificate(
    master: TlsMaster, authority: Authority
) -> None:
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    url = f"https://localhost:{master.port}"
    with httpx2.Client(base_url=url, verify=context, timeout=60) as http:
        link = http.post(
            "/api/v1/sign-in-links", headers={"Authorization": f"Bearer {master.token}"}
        ).json()["url"]
        for host in ("localhost", "head.lab"):
            place = {"Host": f"{host}:{master.port}"}
            reply = http.get("/api/v1/session", headers=place)
            assert reply.status_code == 200
            foreign = place | {"Origin": "https://evil.example"}
            assert http.get("/api/v1/session", headers=foreign).status_code == 403
        signed_in = http.get(link.removeprefix(url))
    assert "Secure" in signed_in.headers["set-cookie"]


def test_nothing_secret_is_in_the_command_line(master: TlsMaster) -> None:
    words = " ".join(psutil.Process(master.process.pid).cmdline())
    assert master.token not in words
    assert "PRIVATE" not in words


def test_files_that_cannot_be_used_are_refused_before_anything_starts(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("localhost")
    other = Authority(tmp_path / "other").issue("localhost")
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert": files["tls_cert"]}, "must be given together"),
        (files | {"tls_cert": tmp_path / "none.pem"}, "files that can be read"),
        (files | {"tls_cert": broken}, "must be a file with a certificate"),
        (files | {"tls_key": other["tls_key"]}, "a certificate and its own key"),
        (authority.issue("old", until=NOW - DAY / 2), "refused: certificate has expired"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            serve(tmp_path / "home", port=0, **given)  # type: ignore[arg-type]
    files = authority.issue("localhost")
    files["tls_key"].chmod(0o644)
    with pytest.raises(ValueError, match=r"others may not read, .* has mode 0644. Hint: chmod"):
        serve(tmp_path / "home", port=0, **files)  # type: ignore[arg-type]
    assert not (tmp_path / "home").exists()


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("localhost")
    key = serialization.load_pem_private_key(files["tls_key"].read_bytes(), None)
    files["tls_key"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match="without a passphrase"):
        check_server_files(files["tls_cert"], files["tls_key"])


@pytest.mark.parametrize(
    ("names", "public"),
    [(("localhost", "head", "192.168.0.5"), "head"), (("*.lab", "192.168.0.5"), "192.168.0.5")],
)
def test_others_are_told_a_name_that_the_certificate_is_for(
    authority: Authority, names: tuple[str, ...], public: str
) -> None:
    files = authority.issue(*names)
    assert server_names(files["tls_cert"], files["tls_key"]) == [*names]
    assert _host_for_others("0.0.0.0", _Tls.of(files["tls_cert"], files["tls_key"])) == public
