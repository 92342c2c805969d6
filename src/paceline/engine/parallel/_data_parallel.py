"""Methods that sum gradients over the ranks."""

from enum import Enum


class DataParallel(str, Enum):
    """Method that sums gradients over the ranks.

    FLAT sums them in one buffer after the backward pass, in an order that never changes.
    OVERLAPPED sums them in buckets during the backward pass, which suits GPUs. FSDP divides the
    parameters among the ranks as well. HOROVOD does what FLAT does by Horovod's allreduce.
    """

    FLAT = "flat"
    OVERLAPPED = "overlapped"
    FSDP = "fsdp"
    HOROVOD = "horovod"

    @classmethod
    def of(cls, value: "str | DataParallel") -> "DataParallel":
        """Return the member of a name.

        Raises:
            ValueError: There is none of this name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                "`data_parallel` must be 'flat', 'overlapped', 'fsdp' or 'horovod', but got"
                f" {value!r}."
            ) from None


def default_data_parallel(
    device_type: str, backend: str | None, num_ranks: int, tensor_size: int = 1
) -> DataParallel:
    """Return how gradients are summed if the user does not say.

    They are summed during the backward pass where that saves time: among several ranks with a GPU
    each, which NCCL joins. gloo takes the processor that the backward pass computes on.

    Args:
        device_type: The type of the ranks' devices, such as "cuda".
        backend: The back end of the process group; None without one.
        num_ranks: The number of ranks.
        tensor_size: The ranks of a tensor-parallel group, whose models are not overlapped.
    """
    is_on_gpus = device_type == "cuda" and backend == "nccl"
    if is_on_gpus and num_ranks > 1 and tensor_size == 1:
        return DataParallel.OVERLAPPED
    return DataParallel.FLAT
