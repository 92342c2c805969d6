"""Fetching a checkpoint's files, by one rank or by the ranks of a node together."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from paceline.core._distributed_context import DistributedContext
from paceline.core._enums import DownloadMode
from paceline.core._sharded_checkpoint_checks import check_selector, failing_together
from paceline.storage import CheckpointStorage, Selector

_MUST = "With `LocalWorkersShareDownload` all ranks must "


class CheckpointDownload:
    """Fetch from a storage for one rank."""

    def __init__(self, storage: CheckpointStorage, distributed: DistributedContext) -> None:
        self._storage = storage
        self._distributed = distributed

    def restore_path(
        self, uuid: str, mode: DownloadMode, selector: Selector | None
    ) -> AbstractContextManager[Path]:
        """Return a context manager with a directory of verified files, to read only."""
        check_selector(selector)
        if _is_shared(mode):
            return self._restoring_together(uuid, selector)
        if selector is None:
            return self._storage.restore_path(uuid)
        return self._storage.restore_path(uuid, selects=selector)

    def download(
        self,
        uuid: str,
        ckpt_dir: str | os.PathLike[str],
        mode: DownloadMode,
        selector: Selector | None,
    ) -> None:
        """Copy files into a directory, and verify them."""
        check_selector(selector)
        target = Path(ckpt_dir)
        if _is_shared(mode):
            self._download_together(uuid, target, selector)
        elif selector is None:
            self._storage.download(uuid, target)
        else:
            self._storage.download(uuid, target, selects=selector)

    @contextmanager
    def _restoring_together(self, uuid: str, selector: Selector | None) -> Iterator[Path]:
        distributed = self._distributed
        wanted = self._wanted_by_node(uuid, selector)
        # Left on no rank before all have left the block.
        with ExitStack() as stack:
            found = None
            with failing_together(distributed, f"{_MUST}find the checkpoint"):
                if distributed.local_rank == 0:
                    restored = self._storage.restore_path(uuid, selects=wanted.__contains__)
                    found = str(stack.enter_context(restored))
            path = distributed.broadcast_local(found)
            assert path is not None
            with failing_together(distributed, f"{_MUST}end the block of `restore_path`"):
                yield Path(path)
            with failing_together(distributed, f"{_MUST}only read the files"):
                stack.close()

    def _download_together(self, uuid: str, target: Path, selector: Selector | None) -> None:
        distributed = self._distributed
        wanted = self._wanted_by_node(uuid, selector)
        given = distributed.allgather_local(os.path.abspath(target))
        with failing_together(distributed, f"{_MUST}find the checkpoint"):
            if len(set(given)) > 1:
                raise ValueError(
                    "`ckpt_dir` must be the same on all ranks of a node with"
                    f" `LocalWorkersShareDownload`, but got {', '.join(sorted(set(given)))}."
                    " Hint: pass `DownloadMode.NoSharedDownload`."
                )
            if distributed.local_rank == 0:
                self._storage.download(uuid, target, selects=wanted.__contains__)

    def _wanted_by_node(self, uuid: str, selector: Selector | None) -> set[str]:
        """Return the paths of the files that the ranks of this node select."""
        with failing_together(self._distributed, f"{_MUST}find the checkpoint"):
            names = list(self._storage.manifest(uuid).selected(selector).files)
        # Ranks may be given different checkpoints by mistake.
        by_rank = self._distributed.allgather_local((uuid, names))
        with failing_together(self._distributed, f"{_MUST}name the same checkpoint"):
            uuids = sorted({given for given, _ in by_rank})
            if len(uuids) > 1:
                raise ValueError(
                    "`uuid` must be the same on all ranks of a node with"
                    f" `LocalWorkersShareDownload`, but got {', '.join(uuids)}."
                )
        return {name for _, names in by_rank for name in names}


def _is_shared(mode: object) -> bool:
    if not isinstance(mode, DownloadMode):
        raise TypeError(f"`download_mode` must be a DownloadMode, but got {mode!r}.")
    return mode is DownloadMode.LocalWorkersShareDownload
