"""Runners that a master starts by the API of Kubernetes; the cluster is a fake."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starter_contract import Cluster, Pool, StarterContract, attempts_of

from paceline.master.starters import RunnerOrder, StarterError, read_pool_file
from paceline.master.starters._kubernetes import KubernetesOptions, KubernetesStarter

pytest.importorskip("kubernetes", reason="NOT TESTED: needs pip install 'paceline[kubernetes]'")
pytest.importorskip("jsonschema", reason="NOT TESTED: jsonschema is not installed")

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
    options = KubernetesOptions(**cluster.definition["options"])
    starter = KubernetesStarter("Far_1", "c" * 32, "~/.paceline-runner", options)
    yield starter
    starter.close()


def order(number: int = 1, command: tuple[str, ...] = ("sh", "-c", "sleep 60")) -> RunnerOrder:
    return RunnerOrder(
        name=f"Far_1-{number:06x}",
        url="https://head:1",
        token=f"secret-{number}",
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
    starter.close()
    with pytest.raises(StarterError, match=r"Kubernetes: Unauthorized \(401\)"):
        starter.runners()
    (fake.root / "kubeconfig").write_text(text)
    # The file is read again.
    starter.runners()


def test_a_starter_without_its_package_is_told_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.master.starters import _pool_file

    monkeypatch.setattr(_pool_file, "find_spec", lambda _: None)
    path = tmp_path / "pools.yaml"
    path.write_text("pools: {a: {starter: kubernetes, options: {image: x}}}")
    with pytest.raises(ValueError, match=r"pools\.a: .*pip install 'paceline\[kubernetes\]'"):
        read_pool_file(path, "cluster")
