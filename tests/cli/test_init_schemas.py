"""The files of panther init for Kubernetes against the schemas that Kubernetes and Kubeflow publish as packages.

kubernetes-validate has those of every Kubernetes version, kubeflow-training that of PyTorchJob v1, kubeflow-trainer-api
that of TrainJob, of Kubeflow Trainer 2. KubeRay publishes none as a package: the pods of a RayJob are checked as pods.
"""

from pathlib import Path

import pytest
import yaml

from panther.cli import main

pytestmark = pytest.mark.engine
SIZES = [
    "--nodes=3", "--gpus-per-node=4", "--cpus-per-node=16", "--memory=64G", "--volume=runs:/runs", "--max-restarts=2",
    "--backend=nccl", "--name=my-job", "--grace=60",
]  # fmt: skip


@pytest.fixture(params=[[], SIZES], ids=["one node", "three nodes"])
def documents(request, tmp_path, monkeypatch):
    """All documents by their kind."""
    monkeypatch.chdir(tmp_path)
    found = {}
    for kind in ("kubernetes", "ray"):
        assert main(["init", kind, "--image=me/x:1", *request.param, "train.py", "--lr", "$HOME 'quoted'"]) == 0
    for path in Path().glob("*.yaml"):
        found |= {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}
    assert found.keys() == {"Job", "Service", "PyTorchJob", "TrainJob", "ConfigMap", "RayJob"}
    return found


def pods_of(rayjob):
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("version", ["1.27", "newest"])
def test_kubernetes_own_kinds(documents, version):
    validator = pytest.importorskip("kubernetes_validate")
    chosen = validator.latest_version() if version == "newest" else version
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod} for pod in pods_of(documents["RayJob"])
    ]
    for document in (documents["Job"], documents["Service"], documents["ConfigMap"], *pods):
        validator.validate(document, chosen, strict=True)
    for broken in ({"completions": "3"}, {"completion": 3}):
        spec = documents["Job"]["spec"] | broken
        with pytest.raises(validator.ValidationError):
            validator.validate(documents["Job"] | {"spec": spec}, chosen, strict=True)


def read(model, document):
    """What the published classes of a kind keep of a document: unknown fields are dropped, wrong types refused."""
    return model.from_dict(document).to_dict()


def test_trainjob_of_kubeflow_trainer_2(documents):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document = documents["TrainJob"]
    assert read(models.TrainerV1alpha1TrainJob, document) == document
    wrong = document | {"spec": document["spec"] | {"trainer": {"numNodes": "two"}}}
    with pytest.raises(ValueError, match="numNodes"):
        read(models.TrainerV1alpha1TrainJob, wrong)
    unknown = document | {"spec": document["spec"] | {"nodes": 2}}
    assert read(models.TrainerV1alpha1TrainJob, unknown) != unknown


def kept(models, kind, value, path):
    """What the classes of kubeflow-training, which name the types of their fields as texts, know of a value."""
    if kind.startswith("list["):
        return [kept(models, kind[5:-1], entry, f"{path}[]") for entry in value]
    if kind.startswith("dict("):
        return {name: kept(models, kind[5:-1].split(", ")[1], entry, f"{path}.{name}") for name, entry in value.items()}
    simple = {"str": str, "int": int, "bool": bool, "float": float, "object": object}
    if kind in simple:
        assert isinstance(value, simple[kind]), f"{path}: {value!r} is not a {kind}"
        return value
    model = getattr(models, kind)
    fields = {name: model.openapi_types[field] for field, name in model.attribute_map.items()}
    return {
        name: kept(models, fields[name], entry, f"{path}.{name}") for name, entry in value.items() if name in fields
    }


def test_pytorchjob_of_the_training_operator(documents):
    training = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client.models")

    class Models:
        def __getattr__(self, name):
            return getattr(training, name, None) or getattr(client, name)

    document = documents["PyTorchJob"]
    models = Models()
    assert kept(models, "KubeflowOrgV1PyTorchJob", document, "PyTorchJob") == document
    # Their constructors refuse a missing field.
    for replicas in document["spec"]["pytorchReplicaSpecs"].values():
        client.V1PodSpec(containers=replicas["template"]["spec"]["containers"])
    unknown = document | {"spec": document["spec"] | {"nprocs": "2"}}
    assert kept(models, "KubeflowOrgV1PyTorchJob", unknown, "PyTorchJob") != unknown
    wrong = document | {"spec": document["spec"] | {"nprocPerNode": 2}}
    with pytest.raises(AssertionError, match=r"PyTorchJob\.spec\.nprocPerNode: 2 is not a str"):
        kept(models, "KubeflowOrgV1PyTorchJob", wrong, "PyTorchJob")
