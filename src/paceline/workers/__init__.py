"""Groups of worker processes: start them, watch them, read their output, end them in time."""

from typing import TYPE_CHECKING

from paceline._late_names import late_names
from paceline._listening import PortReservation
from paceline._network_interfaces import LOOPBACK
from paceline._usable_cores import num_cores
from paceline.workers._call_in_workers import call_in_workers
from paceline.workers._elastic_group import ElasticGroup
from paceline.workers._elastic_size import (
    ElasticLimits,
    ElasticSize,
    Form,
    GiveUp,
    GrowthAttempts,
    Wait,
)
from paceline.workers._errors import (
    OUTPUT_IS,
    CollectiveMismatchError,
    NodesDifferError,
    NotEnoughWorkersError,
    RanksDifferError,
    RemoteTraceback,
    ResourcesError,
    RunDirectoryError,
    TrainingFailedError,
    WorkerFailedError,
    WorkersLostError,
    WorkerStartError,
    is_told,
)
from paceline.workers._group_run import GroupRun
from paceline.workers._kept_worker_state import (
    KeptState,
    MemoryFile,
    StateFunctions,
    read_parts,
    write_part,
)
from paceline.workers._launch_run import LaunchGroup, LaunchRun
from paceline.workers._outer_launcher_group import JoinedGroup
from paceline.workers._recovering_group import RecoveringGroup
from paceline.workers._restart_policy import RestartPolicy
from paceline.workers._worker_resources import (
    WorkerResources,
    WorkerSettings,
    check_crowd,
    checked_resources,
    chosen_cluster,
)
from paceline.workers.pools._inline_pool import InlinePool
from paceline.workers.pools._local_pool import LocalPool
from paceline.workers.pools._outer_launcher_pool import JoinedPool, prepare_joined
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._pickling import NotSendableError, dump, load
from paceline.workers.pools._program_pool import ProgramPool, WorkerCommand, WorkerVariables
from paceline.workers.pools._ray_pool import RayPool
from paceline.workers.pools._worker_pool import WorkerPool
from paceline.workers.processes._end_without_shutdown import end_without_shutdown
from paceline.workers.processes._fork_client import stop_fork_server
from paceline.workers.processes._horovod_rendezvous import HorovodRendezvous
from paceline.workers.processes._join_process_group import join_process_group
from paceline.workers.processes._leftover_processes import end_marked, kill_leftover
from paceline.workers.processes._local_worker_group import LocalGroup
from paceline.workers.processes._output_files import WorkerOutput
from paceline.workers.processes._output_lines import LINE_CHARACTERS, LineSplitter, OutputLine
from paceline.workers.processes._process_start import prepare_start
from paceline.workers.processes._rank_environment import (
    SHARDS_VARIABLE,
    THREADS_MARK,
    THREADS_VARIABLE,
    NodeLayout,
    is_port_free,
    rank_environment,
    shards_of_launcher,
    thread_environment,
)
from paceline.workers.processes._rank_info import RankInfo
from paceline.workers.processes._signals import noted_signals
from paceline.workers.processes._stopped_workers import LEAST_HEARTBEAT_TIMEOUT_S
from paceline.workers.processes._sweep_after_kill import sweeping_after_kill
from paceline.workers.processes._worker_exit import WorkerExit, signal_name
from paceline.workers.processes._worker_program import PROGRAM_FILE
from paceline.workers.processes._worker_spec import WorkerSpec
from paceline.workers.remote._driver_link import DriverLink, driver_link
from paceline.workers.remote._launch_nodes import LaunchNodes
from paceline.workers.remote._ray_bundles import why_waiting
from paceline.workers.remote._ray_cluster import (
    RayConnection,
    import_ray,
    join_ray,
    told_resources,
)

if TYPE_CHECKING:
    from paceline.workers.remote._forwarded_storage import ForwardedRun, ForwardedStorage
    from paceline.workers.remote._ray_data_shards import (
        RayShards,
        check_ray_data,
        dealt,
        is_ray_dataset,
    )
    from paceline.workers.remote._storage_requests import StorageRequests

__all__ = [
    "LEAST_HEARTBEAT_TIMEOUT_S",
    "LINE_CHARACTERS",
    "LOOPBACK",
    "OUTPUT_IS",
    "PROGRAM_FILE",
    "SHARDS_VARIABLE",
    "THREADS_MARK",
    "THREADS_VARIABLE",
    "CollectiveMismatchError",
    "DriverLink",
    "ElasticGroup",
    "ElasticLimits",
    "ElasticSize",
    "Form",
    "ForwardedRun",
    "ForwardedStorage",
    "GiveUp",
    "GroupRun",
    "LaunchRun",
    "GrowthAttempts",
    "HorovodRendezvous",
    "InlinePool",
    "JoinedGroup",
    "JoinedPool",
    "KeptState",
    "LaunchGroup",
    "LaunchNodes",
    "LineSplitter",
    "LocalGroup",
    "LocalPool",
    "MemoryFile",
    "NodeLayout",
    "NodesDifferError",
    "NotEnoughWorkersError",
    "NotSendableError",
    "OutputLine",
    "PendingCall",
    "PortReservation",
    "ProgramPool",
    "RankInfo",
    "RanksDifferError",
    "RayConnection",
    "RayPool",
    "RayShards",
    "RecoveringGroup",
    "RemoteTraceback",
    "ResourcesError",
    "RestartPolicy",
    "RunDirectoryError",
    "StateFunctions",
    "StorageRequests",
    "TrainingFailedError",
    "Wait",
    "WorkerCommand",
    "WorkerExit",
    "WorkerFailedError",
    "WorkerOutput",
    "WorkerPool",
    "WorkerResources",
    "WorkerSettings",
    "WorkerSpec",
    "WorkerStartError",
    "WorkerVariables",
    "WorkersLostError",
    "call_in_workers",
    "check_crowd",
    "check_ray_data",
    "checked_resources",
    "chosen_cluster",
    "dealt",
    "driver_link",
    "dump",
    "end_marked",
    "end_without_shutdown",
    "import_ray",
    "is_port_free",
    "is_ray_dataset",
    "is_told",
    "join_process_group",
    "join_ray",
    "kill_leftover",
    "load",
    "noted_signals",
    "num_cores",
    "prepare_joined",
    "prepare_start",
    "rank_environment",
    "read_parts",
    "shards_of_launcher",
    "signal_name",
    "stop_fork_server",
    "sweeping_after_kill",
    "thread_environment",
    "told_resources",
    "why_waiting",
    "write_part",
]

# They stand on journals and storages, which a launcher has no use for.
__getattr__ = late_names(
    __name__,
    {
        "ForwardedRun": "remote._forwarded_storage",
        "RayShards": "remote._ray_data_shards",
        "check_ray_data": "remote._ray_data_shards",
        "dealt": "remote._ray_data_shards",
        "is_ray_dataset": "remote._ray_data_shards",
        "ForwardedStorage": "remote._forwarded_storage",
        "StorageRequests": "remote._storage_requests",
    },
)
