"""The YAML files of ``panther init``: Kubernetes' Job and PyTorchJob, and docker compose.

Strings are written as JSON does, which YAML reads the same way.
"""

__all__ = ["compose", "job", "pytorchjob", "to_yaml"]

import json
from typing import Any

from panther.cli.init._job import JobConfig

_HEAD = "# Written by panther init. "


def to_yaml(value: Any, indent: int = 0) -> str:
    """Write nested dicts and lists as YAML.

    Example:
        >>> print(to_yaml({"a": ["x: y", 1], "b": {}}))
        a:
        - "x: y"
        - 1
        b: {}
    """
    pad = " " * indent
    if isinstance(value, dict) and value:
        return "\n".join(
            f"{pad}{key}:\n{to_yaml(entry, indent + (2 if isinstance(entry, dict) else 0))}"
            if isinstance(entry, dict | list) and entry
            else f"{pad}{key}: {json.dumps(entry)}"
            for key, entry in value.items()
        )
    if isinstance(value, list) and value:
        return "\n".join(
            f"{pad}- {to_yaml(entry, indent + 2).lstrip()}"
            if isinstance(entry, dict)
            else f"{pad}- {json.dumps(entry)}"
            for entry in value
        )
    return pad + json.dumps(value)


def job(config: JobConfig) -> str:
    """An Indexed Job, each index a node, and the Service by which they find each other."""
    name = config.name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": config.port}],
        },
    }
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    pod = _pod(config, "trainer", f"{name}-0.{name}", "NODE_RANK")
    pod["containers"][0]["env"] = [{"name": "NODE_RANK", "valueFrom": rank}]
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": config.nodes,
            "parallelism": config.nodes,
            "completionMode": "Indexed",
            # When one pod fails the others do, and all are made again.
            "backoffLimit": config.nodes * config.max_restarts,
            "template": {"spec": {"subdomain": name, "restartPolicy": "Never", **pod}},
        },
    }
    start = f"{_HEAD}Start with: kubectl apply -f job.yaml\n"
    return f"{start}{to_yaml(service)}\n---\n{to_yaml(manifest)}\n"


def pytorchjob(config: JobConfig) -> str:
    """A PyTorchJob, for clusters with Kubeflow's training operator."""
    replicas = {"Master": 1, "Worker": config.nodes - 1}
    pod = _pod(config, "pytorch", f"{config.name}-master-0", "RANK")  # the operator asks for this name, and sets RANK
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": config.name},
        "spec": {
            "nprocPerNode": str(config.processes),
            "runPolicy": {"backoffLimit": config.nodes * config.max_restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for role, count in replicas.items()
                if count
            },
        },
    }
    return f"{_HEAD}Start with: kubectl apply -f pytorchjob.yaml\n{to_yaml(manifest)}\n"


def compose(config: JobConfig) -> str:
    """A compose file in which each node is a service of one machine."""
    services = {}
    for rank in range(config.nodes):
        words = ["panther", "launch", *config.arguments("node0", str(rank))]
        service: dict[str, Any] = {
            "image": config.image,
            "hostname": f"node{rank}",
            "command": [word.replace("$", "$$") for word in words],  # else compose takes it for a variable
            "working_dir": "/app",
            "volumes": [".:/app"],
            "shm_size": "1gb",
            "stop_grace_period": f"{config.grace + 30}s",
        }
        if config.memory:
            service["mem_limit"] = config.memory.lower()
        if config.cpus_per_node:
            service["cpus"] = config.cpus_per_node
        if config.gpus_per_node:
            # Each node gets GPUs of its own.
            first = rank * config.gpus_per_node
            ids = [str(number) for number in range(first, first + config.gpus_per_node)]
            device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        services[f"node{rank}"] = service
    return f"{_HEAD}Start with: docker compose up\n{to_yaml({'name': config.name, 'services': services})}\n"


def _pod(config: JobConfig, container: str, host: str, rank_variable: str) -> dict[str, Any]:
    limits = {
        "nvidia.com/gpu": config.gpus_per_node or None,
        "cpu": config.cpus_per_node,
        "memory": f"{config.memory}i" if config.memory else None,
    }
    marker = "NODE-RANK-GOES-HERE"
    words = [word.replace("$", "$$") for word in config.arguments(host, marker)]  # $(NAME) is a variable to Kubernetes
    words = [f"--node-rank=$({rank_variable})" if word == f"--node-rank={marker}" else word for word in words]
    # What a container has by default is too small for the workers of data loaders.
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if config.volume:
        claim, _, path = config.volume.partition(":")
        mounts.append({"name": "kept", "mountPath": path})
        volumes.append({"name": "kept", "persistentVolumeClaim": {"claimName": claim}})
    main: dict[str, Any] = {
        "name": container,
        "image": config.image,
        "command": ["panther", "launch"],
        "args": words,
        "volumeMounts": mounts,
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    if limits:
        main["resources"] = {"limits": limits}
    if config.nodes > 1:
        main["ports"] = [{"name": "rendezvous", "containerPort": config.port}]
    return {
        "terminationGracePeriodSeconds": config.grace + 30,
        "containers": [main],
        "volumes": volumes,
    }
