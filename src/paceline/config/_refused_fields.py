"""Fields and values that the predecessor has and Paceline refuses by name."""

_LATER = "is not offered yet"
_NO_CONTAINERS = "is not offered, as Paceline runs trials without containers"
_FROM_ENVIRONMENT = (
    "comes from the environment of the master and of each node's runner (AWS_ACCESS_KEY_ID,"
    " AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
)

REFUSED_FIELDS: dict[str, dict[str, str]] = {
    "": dict.fromkeys(
        (
            "bind_mounts",
            "data_layer",
            "integrations",
            "internal",
            "log_policies",
            "pbs",
            "project",
            "retention_policy",
            "security",
            "slurm",
            "tensorboard_storage",
            "workspace",
        ),
        _LATER,
    ),
    "resources": dict.fromkeys(
        (
            "agent_label",
            "devices",
            "is_single_node",
            "native_parallel",
            "shm_size",
            "slots",
        ),
        _LATER,
    ),
    "environment": dict.fromkeys(
        (
            "add_capabilities",
            "drop_capabilities",
            "force_pull_image",
            "image",
            "pod_spec",
            "ports",
            "proxy_ports",
            "registry_auth",
        ),
        _NO_CONTAINERS,
    ),
    "checkpoint_storage": {
        **dict.fromkeys(
            ("checkpoint_path", "container_path", "propagation", "tensorboard_path"), _NO_CONTAINERS
        ),
        **dict.fromkeys(("access_key", "secret_key", "endpoint_url"), _FROM_ENVIRONMENT),
    },
}
"""For each section, why a field is refused; a field that the section has comes before this."""
