"""Fields that the predecessor has and Paceline refuses by name, and what replaces them."""

from typing import NamedTuple


class RefusedField(NamedTuple):
    """Why a field is refused, as the end of a sentence, and a hint at what replaces it."""

    reason: str
    hint: str = "leave it out."


_LATER = RefusedField("is not offered yet")
_NO_CONTAINERS = RefusedField("is not offered, as Paceline runs trials without containers")
_IMAGE = "run the command in an image by `environment.prefix: [apptainer, exec, IMAGE]`."
_LABELS = "mark the experiment by `labels: [NAME]`; lists of experiments filter by them."
_POOL = "describe a pool with `starter: slurm` in `pools.yaml`, and name it by `resources.pool`."
_FROM_ENVIRONMENT = RefusedField(
    "comes from the environment of the master and of each node's runner (AWS_ACCESS_KEY_ID,"
    " AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
)

REFUSED_FIELDS: dict[str, dict[str, RefusedField]] = {
    "": {
        "bind_mounts": RefusedField(
            _NO_CONTAINERS.reason,
            "use the paths of the machine; of an image in `environment.prefix`, its own option for"
            " mounts, such as `--bind`.",
        ),
        "data_layer": RefusedField(_LATER.reason, "read files and objects by `paceline.data`."),
        "integrations": _LATER,
        "internal": _LATER,
        "log_policies": RefusedField(
            _LATER.reason,
            "leave it out; a trial that fails the same way twice is not started again.",
        ),
        "pbs": RefusedField(_LATER.reason, "start `paceline runner` in a job of PBS."),
        "project": RefusedField(_LATER.reason, _LABELS),
        "retention_policy": RefusedField(
            _LATER.reason,
            "leave it out; `paceline experiment delete` deletes logs too.",
        ),
        "security": _LATER,
        "slurm": RefusedField(_LATER.reason, _POOL),
        "tensorboard_storage": RefusedField(
            _LATER.reason,
            "leave it out; TensorBoard files are in the checkpoint storage, below `tensorboard`.",
        ),
        "workspace": RefusedField(_LATER.reason, _LABELS),
    },
    "resources": {
        "agent_label": RefusedField(_LATER.reason, "name a pool of nodes by `resources.pool`."),
        "devices": RefusedField(_NO_CONTAINERS.reason, "leave it out; trials see all devices."),
        "is_single_node": RefusedField(
            _LATER.reason, "leave it out; a trial takes one node if one has enough slots."
        ),
        "native_parallel": _LATER,
        "shm_size": RefusedField(_NO_CONTAINERS.reason, "leave it out; trials use /dev/shm."),
        "slots": RefusedField(_LATER.reason, "give `resources.slots_per_trial`."),
    },
    "environment": {
        **dict.fromkeys(
            ("add_capabilities", "drop_capabilities", "ports", "proxy_ports"), _NO_CONTAINERS
        ),
        **dict.fromkeys(
            ("force_pull_image", "image", "registry_auth"),
            RefusedField(_NO_CONTAINERS.reason, _IMAGE),
        ),
        "pod_spec": RefusedField(
            _NO_CONTAINERS.reason,
            "describe the pods by a pool with `starter: kubernetes` in `pools.yaml`.",
        ),
    },
    "checkpoint_storage": {
        **dict.fromkeys(
            ("checkpoint_path", "container_path", "propagation", "tensorboard_path"), _NO_CONTAINERS
        ),
        **dict.fromkeys(("access_key", "secret_key", "endpoint_url"), _FROM_ENVIRONMENT),
    },
}
"""For each section, why a field is refused; a field that the section has comes before this."""
