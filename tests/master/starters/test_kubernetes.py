"""Runners that a master starts by the API of Kubernetes; the cluster is a fake."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from starter_contract import Cluster, Pool, StarterContract, attempts_of

from paceline._cluster.master.starters import kubernetes_api as _kubernetes_watch
from paceline._cluster.master.starters.kubernetes_starter import (
    KubernetesOptions,
    KubernetesStarter,
)
from paceline._cluster.master.starters.pool_runners import read_pool_file
from paceline._cluster.master.starters.slurm_ssh_ray_starters import RunnerOrder, StarterError

pytest.importorskip("lightkube", reason="NOT TESTED: needs pip install 'paceline[kubernetes]'")

from kubernetes_fake import FakeKubernetes, serve


class Fake(Cluster):
    waiting = {"queue": "closed"}

    def __init__(self, fake: FakeKubernetes) -> None:
        self.fake = fake
        options = {
            "kubeconfig": str(fake.root / "kubeconfig"),
            "namespace": "lab",
            "image": "lab/paceline:1",
            "queue": "gpus",
            "service_account": "trainer",
            "resources": {"nvidia.com/gpu": 1, "memory": "64Gi"},
            "node_selector": {"zone": "a"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        }
        self.definition = {"starter": "kubernetes", "options": options}

    def jobs(self) -> list[bool]:
        with self.fake.lock:
            pods = list(self.fake.objects["pods"].values())
            waiting = [
                one for one in self.fake.objects["jobsets"].values() if one["spec"].get("suspend")
            ]
        phases = [pod["status"]["phase"] for pod in pods]
        runs = [phase == "Running" for phase in phases if phase in ("Pending", "Running")]
        return runs + [False] * len(waiting)

    def num_groups(self) -> int:
        return len(self.fake.objects["jobsets"])

    def end_one(self) -> None:
        self.fake.delete_pod()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeKubernetes]:
    root = tmp_path / "kubernetes"
    root.mkdir()
    with serve(root) as fake:
        yield fake


@pytest.fixture
def cluster(fake: FakeKubernetes) -> Fake:
    return Fake(fake)


class TestKubernetes(StarterContract):
    pass


@pytest.fixture
def starter(cluster: Fake) -> Iterator[KubernetesStarter]:
    with closing(new_starter(KubernetesOptions(**cluster.definition["options"]))) as starter:
        yield starter


def new_starter(options: KubernetesOptions) -> KubernetesStarter:
    return KubernetesStarter("Far_1", "c" * 32, "~/.paceline-runner", options)


def order(number: int = 1, command: tuple[str, ...] = ("sh", "-c", "sleep 60")) -> RunnerOrder:
    return RunnerOrder(
        name=f"Far_1-{number:06x}",
        url="https://head:1",
        token=f"secret-{number}",
        node_key=f"secret-key-{number}",
        certificate="PEM",
        command=command,
    )


def test_the_objects_have_what_the_options_say_and_no_token(
    starter: KubernetesStarter, fake: FakeKubernetes
) -> None:
    fake.close()
    starter.start_group([order(1), order(2)])
    [job_set] = fake.objects["jobsets"].values()
    [secret] = fake.objects["secrets"].values()
    assert "secret-" not in json.dumps(job_set)
    assert secret["texts"] == {
        "Far_1-000001.token": "secret-1", "Far_1-000002.token": "secret-2", "master.pem": "PEM",
        "Far_1-000001.key": "secret-key-1", "Far_1-000002.key": "secret-key-2",
    }  # fmt: skip
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job_set["metadata"]["uid"]
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job_set["spec"]["suspend"] is True
    [replicated] = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (2, 2)
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "lab/paceline:1"
    gpus = {"nvidia.com/gpu": "1", "memory": "64Gi"}
    assert container["resources"] == {"requests": gpus, "limits": gpus}
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["terminationGracePeriodSeconds"] == 120
    assert {one["mountPath"] for one in container["volumeMounts"]} >= {"/.paceline-runner"}


def test_a_runner_that_is_started_again_after_a_preemption_has_the_same_key(
    starter: KubernetesStarter, fake: FakeKubernetes, tmp_path: Path
) -> None:
    """Its token is the same as well, and may be of no use with another key."""
    starter.directory, seen = str(tmp_path / "files"), tmp_path / "seen"
    script = f'for f in token node_key; do cat "$4/$f"; echo; done >> {seen}; sleep 60'
    starter.start(order(command=("sh", "-c", script, "runner")))
    what = ["secret-1", "secret-key-1"]
    wait_until(lambda: seen.exists() and seen.read_text().split() == what)
    fake.suspend(True)
    wait_until(lambda: not fake.objects["pods"])
    # The volume of a pod goes with it.
    shutil.rmtree(tmp_path / "files")
    fake.suspend(False)
    wait_until(lambda: seen.read_text().split() == what * 2)


def test_without_a_queue_a_job_set_is_not_suspended(cluster: Fake) -> None:
    options = KubernetesOptions(image="image", namespace="lab")
    job_set = KubernetesStarter("far", "c", "/files", options).job_set([order()])
    assert "suspend" not in job_set["spec"]
    assert list(job_set["metadata"]["labels"]) == [
        "app.kubernetes.io/managed-by",
        "paceline/cluster",
    ]


@pytest.mark.slow
def test_a_preempted_job_set_waits_again_and_its_trial_goes_on(
    cluster: Fake, make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool({**cluster.definition, "slots": 1, "max_runners": 1, "idle_timeout": 5.0}, {})
    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: experiment.trials()[0].best_metric == 0.5)
        cluster.fake.suspend(True)
        pool.wait(lambda: attempts_of(client, experiment)[0]["exit"])
        pool.wait(lambda: cluster.jobs() == [False])
        cluster.fake.suspend(False)
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        first, second = attempts_of(client, experiment)
        assert first["exit"]["outcome"] == "preempted"
        assert second["resumed_from"] is not None
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        pool.wait(lambda: not cluster.jobs())


def test_a_runner_that_fails_is_told_once(
    starter: KubernetesStarter, fake: FakeKubernetes, tmp_path: Path
) -> None:
    starter.directory = str(tmp_path / "files")
    starter.start(order(command=("sh", "-c", "echo no module; exit 3")))

    def look_until_it_has_ended() -> None:
        while True:
            starter.runners()

    with pytest.raises(StarterError, match=r"Far_1-000001 failed.*exit code 3: no module"):
        look_until_it_has_ended()
    assert starter.runners() == {}


def test_what_the_api_server_refuses_is_told_and_leaves_nothing(
    starter: KubernetesStarter, fake: FakeKubernetes
) -> None:
    starter.start(order())
    with pytest.raises(StarterError, match=r"Kubernetes: .*already exists \(409\)"):
        starter.start(order())
    wrong = KubernetesOptions(
        **starter.options.model_dump(exclude={"tolerations"}), tolerations=[{"nokey": "x"}]
    )
    other = KubernetesStarter("far", "c", "/files", wrong)
    with pytest.raises(StarterError, match=r"nokey"):
        other.start(order(2))
    other.close()
    assert len(fake.objects["secrets"]) == 1
    text = (fake.root / "kubeconfig").read_text()
    (fake.root / "kubeconfig").write_text(text.replace("a-token", "another-token"))
    with closing(new_starter(starter.options)) as unknown:
        with pytest.raises(StarterError, match=r"Kubernetes: Unauthorized \(401\)"):
            unknown.runners()
        (fake.root / "kubeconfig").write_text(text)
        # The file is read again.
        assert unknown.runners().keys() == {"Far_1-000001"}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_changes_are_told_by_streams_and_not_listed(
    starter: KubernetesStarter, fake: FakeKubernetes, tmp_path: Path
) -> None:
    starter.directory = str(tmp_path / "files")
    assert starter.runners() == {}
    starter.start(order())
    wait_until(lambda: starter.runners() == {"Far_1-000001": True})
    fake.delete_pod()
    wait_until(lambda: starter.runners() == {})
    assert (fake.num("GET pods"), fake.num("GET jobsets")) == (1, 1)
    assert (fake.num("WATCH pods"), fake.num("WATCH jobsets")) == (1, 1)


@pytest.mark.parametrize("fault", ["cut", "halve", "gone event", "gone", "gone list"])
@pytest.mark.parametrize("kind", ["pods", "jobsets"])
def test_after_a_stream_that_fails_the_objects_are_listed_again(
    starter: KubernetesStarter, fake: FakeKubernetes, tmp_path: Path, fault: str, kind: str
) -> None:
    """A stream cut in a line, with and without the end of the answer, and versions that are gone.

    The change whose line was cut is in the list, and the next change in the next stream.
    """
    starter.directory = str(tmp_path / "files")
    assert starter.runners() == {}
    # For a request to fail, a stream must end first.
    fake.fail(f"{fault} {kind}", *([f"cut {kind}"] if fault in ("gone", "gone list") else []))
    starter.start(order())
    wait_until(lambda: starter.runners() == {"Far_1-000001": True})
    fake.delete_pod()
    wait_until(lambda: starter.runners() == {})
    # With "gone", the list is asked for a third time; it is never asked for at each look.
    assert 2 <= fake.num(f"GET {kind}") <= 3
    other = "jobsets" if kind == "pods" else "pods"
    assert fake.num(f"GET {other}") == 1


def test_a_change_that_is_lost_is_seen_with_the_next_list(
    starter: KubernetesStarter,
    fake: FakeKubernetes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_kubernetes_watch, "_WATCH_S", 1)
    starter.directory = str(tmp_path / "files")
    assert starter.runners() == {}
    # The pod is made, runs, is being deleted and is gone.
    fake.fail(*["lose pods"] * 4)
    starter.start(order())
    wait_until(lambda: starter.runners() == {"Far_1-000001": True})


def test_a_stream_that_falls_silent_is_given_up_for_a_list(
    starter: KubernetesStarter, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes_watch, "_WATCH_S", 1)
    monkeypatch.setattr(_kubernetes_watch, "_SILENCE_S", 0.5)
    fake.fail("silence pods", "silence jobsets")
    assert starter.runners() == {}
    starter.start(order())
    wait_until(lambda: starter.runners().keys() == {"Far_1-000001"})


@pytest.mark.parametrize("version", ["v1beta1", "v1"])
def test_a_program_gives_the_token_and_another_one_once_it_has_expired(
    cluster: Fake, fake: FakeKubernetes, version: str
) -> None:
    """Kubeconfig files of the large clouds name such programs."""
    program, token = fake.root / "login", fake.root / "token"
    api = f"client.authentication.k8s.io/{version}"
    program.write_text(
        f"""#!/bin/sh
        case "$KUBERNETES_EXEC_INFO" in *'"apiVersion": "{api}"'*) ;; *) exit 3 ;; esac
        test "$CLOUD $1" = "here get-token" || exit 4
        echo '{{"apiVersion": "{api}", "status": {{"token": "'$(cat {token})'"}}}}'
        """
    )
    program.chmod(0o755)
    path = fake.root / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    login = {"apiVersion": api, "command": str(program), "args": ["get-token"]}
    login["env"] = [{"name": "CLOUD", "value": "here"}]
    config["users"][0]["user"] = {"exec": login}
    path.write_text(yaml.safe_dump(config))
    token.write_text("wrong")
    with closing(new_starter(KubernetesOptions(**cluster.definition["options"]))) as starter:
        with pytest.raises(StarterError, match=r"Unauthorized \(401\)"):
            starter.start(order())
        token.write_text(fake.token)
        starter.start(order())
        fake.token = "later"
        token.write_text(fake.token)
        starter.start(order(2))
        assert starter.runners().keys() == {"Far_1-000001", "Far_1-000002"}


def test_a_runner_whose_start_was_not_told_is_not_canceled(
    starter: KubernetesStarter, fake: FakeKubernetes, tmp_path: Path
) -> None:
    starter.directory = str(tmp_path / "files")
    assert starter.runners() == {}
    fake.fail(*["lose pods"] * 2)
    starter.start(order())
    wait_until(
        lambda: [pod["status"]["phase"] for pod in fake.objects["pods"].values()] == ["Running"]
    )
    wait_until(lambda: starter.runners() == {"Far_1-000001": False})
    starter.cancel("Far_1-000001")
    assert len(fake.objects["jobsets"]) == 1


def test_a_server_that_is_away_for_some_seconds_is_waited_for(
    starter: KubernetesStarter, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes_watch, "_WAIT_S", 60.0)
    starter.start(order())
    wait_until(lambda: starter.runners().keys() == {"Far_1-000001"})
    fake.leave()
    seen: list[dict[str, bool]] = []
    looks = threading.Thread(target=lambda: seen.append(starter.runners()))
    wait_until(lambda: not starter._pods._is_current)
    looks.start()
    time.sleep(1)
    assert seen == []
    fake.is_away = False
    looks.join()
    [found] = seen
    assert found.keys() == {"Far_1-000001"}


def test_a_server_that_stays_away_is_told_and_asked_ever_more_seldom(
    starter: KubernetesStarter, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starter.runners() == {}
    pauses: list[float] = []

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        time.sleep(0.01)

    monkeypatch.setattr(starter._pods, "_pause", pause)
    fake.leave()
    wait_until(lambda: len(pauses) > 8)
    # The first try after the cut comes at once.
    assert pauses[:9] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    monkeypatch.setattr(_kubernetes_watch, "_WAIT_S", 0.1)
    with pytest.raises(StarterError, match=r"Kubernetes: (RemoteProtocol|Connect|Read)Error"):
        starter.runners()


def test_objects_that_may_not_be_watched_are_listed(
    starter: KubernetesStarter, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail("forbidden pods")
    assert starter.runners() == {}
    starter.start(order())
    wait_until(lambda: starter.runners().keys() == {"Far_1-000001"})
    fake.delete_pod()
    wait_until(lambda: starter.runners() == {})
    assert fake.num("WATCH pods") == 1
    assert "pods are listed again and again" in caplog.text


def test_a_starter_without_its_package_is_told_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline._cluster.master.starters import pool_runners as _pool_file

    monkeypatch.setattr(_pool_file, "find_spec", lambda _: None)
    path = tmp_path / "pools.yaml"
    path.write_text("pools: {a: {starter: kubernetes, options: {image: x}}}")
    with pytest.raises(ValueError, match=r"pools\.a: .*pip install 'paceline\[kubernetes\]'"):
        read_pool_file(path, "cluster")
