"""What is known of a GPU."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGpu:
    """A GPU or a MIG device.

    Attributes:
        id: What CUDA_VISIBLE_DEVICES may have for it: a number or a UUID.
        uuid: Its UUID; empty if nobody tells.
        name: The name of the product, and of the MIG profile; those of all GPUs if it may be any of
            them; empty if nobody tells.
        memory_bytes: All of its memory; 0 if nobody tells.
        is_mig: Whether it is a MIG device.
        number: Its number as nvidia-smi counts, or that of the GPU that it is a device of; empty if
            nobody tells.
    """

    id: str
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    is_mig: bool = False
    number: str = ""

    def with_id(self, id: str) -> "KnownGpu":
        """Return the same GPU under another id."""
        return replace(self, id=id)

    def is_called(self, name: str) -> bool:
        """Tell whether a name in CUDA_VISIBLE_DEVICES, a number or UUID, is that of this GPU."""
        # The beginning of a UUID is enough for CUDA.
        if name.isdecimal():
            return name == self.id or (name == self.number and not self.is_mig)
        return name == self.id or self.uuid.startswith(name)
